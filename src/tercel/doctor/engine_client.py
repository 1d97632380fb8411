"""Running servers of three engines: greedy answers to token ids, and how many drafts were accepted for them.

vLLM       counters at /metrics (`vllm:spec_decode_*`), read before and after every answer
SGLang     `meta_info` of /generate: a histogram of accepted drafts a step
llama.cpp  `timings` of /completion; with `--metrics` the counters `llamacpp:spec_decode_*` as well
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from tercel.doctor.http import Http, HttpStatusError
from tercel.draft.shape import TreeShape
from tercel.errors import TercelError
from tercel.measure.counters import MAX_DEPTH, MAX_NODES, Counts, number, read_counters, told_shape

EngineName = Literal["vllm", "sglang", "llamacpp"]
_TOKEN_LENGTH = 1024  # characters: longer ones are in no vocabulary


@dataclass(frozen=True)
class Served:
    """An answer: tokens are None if the engine gives text alone. length: generated tokens."""

    text: str
    tokens: tuple[int, ...] | None
    length: int
    counts: Counts


@dataclass(frozen=True)
class SeenPrompt:
    """What the server made of messages with its own template: token ids where it tells them, their number else."""

    tokens: tuple[int, ...] | None
    length: int


class Server(Protocol):
    """All calls raise `TercelError` for a server that fails, or whose answers are not those of its engine."""

    @property
    def engine(self) -> EngineName: ...

    def draft(self) -> TreeShape | None:
        """What is drafted, if that can be known before an answer."""
        ...

    def answer(self, prompt: Sequence[int], max_new_tokens: int) -> Served: ...

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]) -> SeenPrompt: ...


def connect(http: Http, engine: EngineName | Literal["auto"] = "auto") -> Server:
    """The server at `http`; `auto` asks for what only one engine has.

    Raises `TercelError` if it cannot be reached or recognised.
    """
    found = _recognise(http) if engine == "auto" else engine
    if found == "vllm":
        return Vllm(http)
    return Sglang(http) if found == "sglang" else LlamaCpp(http)


def _recognise(http: Http) -> EngineName:
    metrics = _tried(http, "/metrics")
    for prefix, name in (("vllm:", "vllm"), ("sglang:", "sglang"), ("llamacpp:", "llamacpp")):
        if prefix in metrics:
            return name  # type: ignore[return-value]
    if "speculative" in _tried(http, "/server_info") or "speculative" in _tried(http, "/get_server_info"):
        return "sglang"
    if "default_generation_settings" in _tried(http, "/props"):
        return "llamacpp"
    raise TercelError(
        f"the server at {http.base} is not recognised as vLLM, SGLang or llama.cpp; say which it is with --engine"
    )


def _tried(http: Http, path: str) -> str:
    """The text at `path`; empty if the server has no such place."""
    try:
        return http.text(path)
    except HttpStatusError:
        return ""


@dataclass(frozen=True)
class Vllm:
    http: Http
    engine: EngineName = "vllm"

    def _counters(self) -> Counts:
        counts = read_counters(self.http.text("/metrics"), "vllm")
        if counts is None:
            raise TercelError(
                f"the server at {self.http.base} has no counters of speculative decoding, so it runs without a head; "
                "start it with the line that `tercel serve-command HEAD --engine vllm` prints"
            )
        return counts

    def _model(self) -> str:
        models = self.http.get("/v1/models").get("data")
        name = models[0].get("id") if isinstance(models, list) and models and isinstance(models[0], dict) else None
        if not isinstance(name, str):
            raise TercelError(f"{self.http.base}/v1/models names no model; is it a server of vLLM?")
        return name

    def draft(self) -> TreeShape | None:
        positions = self._counters().per_position
        return told_shape(len(positions)) if positions else None

    def answer(self, prompt: Sequence[int], max_new_tokens: int) -> Served:
        before = self._counters()
        body = {
            "model": self._model(),
            "prompt": list(prompt),
            "max_tokens": max_new_tokens,
            "temperature": 0.0,
            "top_p": 1.0,
            "repetition_penalty": 1.0,  # the model's own settings may bring another
            "return_token_ids": True,
        }
        reply = self.http.post("/v1/completions", body)
        choice, usage = _first(reply, self.http), _mapping(reply.get("usage"))
        tokens = _ids(choice.get("token_ids"))
        length = len(tokens) if tokens is not None else usage.get("completion_tokens", 0)
        return _served(choice.get("text"), tokens, length, max_new_tokens, self._counters().since(before))

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]) -> SeenPrompt:
        return _openai_prompt(self.http, self._model(), messages, arguments)


@dataclass(frozen=True)
class Sglang:
    http: Http
    engine: EngineName = "sglang"

    def draft(self) -> TreeShape | None:
        """Raises `TercelError` for a server that runs without drafts."""
        try:
            info = self.http.get("/server_info")
        except HttpStatusError:
            info = self.http.get("/get_server_info")  # until 2025
        depth, top_k = info.get("speculative_num_steps"), info.get("speculative_eagle_topk")
        if not depth:
            raise TercelError(
                f"the server at {self.http.base} runs without speculative decoding; start it with the line that "
                "`tercel serve-command HEAD --engine sglang` prints"
            )
        depth = number(depth, "speculative_num_steps", MAX_DEPTH, least=1)
        return told_shape(depth, top_k or 1, info.get("speculative_num_draft_tokens") or None)

    def answer(self, prompt: Sequence[int], max_new_tokens: int) -> Served:
        sampling = {"temperature": 0.0, "max_new_tokens": max_new_tokens}
        reply = self.http.post("/generate", {"input_ids": list(prompt), "sampling_params": sampling})
        meta = _mapping(reply.get("meta_info"))
        if "completion_tokens" not in meta:
            raise TercelError(f"{self.http.base}/generate answers without meta_info; is it a server of SGLang?")
        length = number(meta["completion_tokens"], "completion_tokens", _most(max_new_tokens))
        counts = self._counts(meta, length)
        return _served(reply.get("text"), _ids(reply.get("output_ids")), length, max_new_tokens, counts)

    def _counts(self, meta: Mapping[str, Any], length: int) -> Counts:
        most = _most(length)  # of its steps, and of what was accepted in them
        histogram = meta.get("spec_correct_drafts_histogram")  # [a]: steps with a accepted drafts
        drafted = number(meta.get("spec_num_proposed_drafts") or 0, "spec_num_proposed_drafts", most * MAX_NODES)
        if isinstance(histogram, list) and histogram:
            number(len(histogram), "the length of spec_correct_drafts_histogram", MAX_DEPTH + 1)
            steps = [number(count, "a count of spec_correct_drafts_histogram", most) for count in histogram]
            beyond = [sum(steps[i + 1 :]) for i in range(len(steps) - 1)]
            return Counts(sum(steps), drafted, sum(beyond), tuple(beyond))
        if meta.get("spec_verify_ct") is None:
            return Counts()
        verified = number(meta["spec_verify_ct"], "spec_verify_ct", most)
        # older servers tell the steps alone: each gives its accepted drafts and one token more
        return Counts(verified, drafted, max(0, length - 1 - verified))

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]) -> SeenPrompt:
        return _openai_prompt(self.http, "default", messages, arguments)


@dataclass(frozen=True)
class LlamaCpp:
    http: Http
    engine: EngineName = "llamacpp"

    def _counters(self) -> Counts | None:
        """None for a server that was started without `--metrics`."""
        return read_counters(_tried(self.http, "/metrics"), "llamacpp")

    def draft(self) -> TreeShape | None:
        return None

    def answer(self, prompt: Sequence[int], max_new_tokens: int) -> Served:
        before = self._counters()
        body = {
            "prompt": list(prompt),
            "n_predict": max_new_tokens,
            "temperature": 0.0,
            "repeat_penalty": 1.0,
            "return_tokens": True,
            "cache_prompt": False,
        }
        reply = self.http.post("/completion", body)
        timings, most = _mapping(reply.get("timings")), _most(max_new_tokens)
        if "predicted_n" not in timings:
            raise TercelError(f"{self.http.base}/completion answers without timings; is it a server of llama.cpp?")
        length = number(timings["predicted_n"], "predicted_n", most)
        drafted = number(timings.get("draft_n", 0), "draft_n", most * MAX_NODES)
        accepted, after = number(timings.get("draft_n_accepted", 0), "draft_n_accepted", most), self._counters()
        steps = max(0, length - 1 - accepted) if drafted else 0
        counts = after.since(before) if after and before else Counts(steps, drafted, accepted)
        return _served(reply.get("content"), _ids(reply.get("tokens")) or None, length, max_new_tokens, counts)

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]) -> SeenPrompt:
        asked = {"messages": [dict(m) for m in messages], **_template_kwargs(arguments)}
        text = self.http.post("/apply-template", asked).get("prompt")
        if not isinstance(text, str):
            raise TercelError(f"{self.http.base}/apply-template gives no prompt; is it a server of llama.cpp?")
        body = {"content": text, "add_special": True, "parse_special": True}  # as its own chat route does
        tokens = _ids(self.http.post("/tokenize", body).get("tokens"))
        if tokens is None:
            raise TercelError(f"{self.http.base}/tokenize gives no tokens; is it a server of llama.cpp?")
        return SeenPrompt(tokens, len(tokens))


def _template_kwargs(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """How a request gives the chat template arguments beside the messages, in all three engines."""
    return {"chat_template_kwargs": dict(arguments)} if arguments else {}


def _openai_prompt(
    http: Http, model: str, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]
) -> SeenPrompt:
    body = {
        "model": model,
        "messages": [dict(m) for m in messages],
        "max_tokens": 1,
        "temperature": 0.0,
        "return_token_ids": True,
        **_template_kwargs(arguments),
    }
    reply = http.post("/v1/chat/completions", body)
    tokens, usage = _ids(reply.get("prompt_token_ids")), _mapping(reply.get("usage"))
    length = len(tokens) if tokens is not None else number(usage.get("prompt_tokens", 0), "prompt_tokens")
    return SeenPrompt(tokens, length)


def _most(tokens: int) -> int:
    """Tokens that an answer of at most `tokens` can have: a step may run past the end by what it drafted."""
    return tokens + MAX_DEPTH


def _served(text: Any, tokens: tuple[int, ...] | None, length: Any, asked: int, counts: Counts) -> Served:
    """Raises `TercelError` for an answer that is longer than one of `asked` tokens can be, or no text."""
    most, text = _most(asked), "" if text is None else text
    if not isinstance(text, str):
        raise TercelError(f"the server answers with a {type(text).__name__} in the place of text; look at its log")
    number(len(text), "the length of its text", most * _TOKEN_LENGTH)
    if tokens is not None:
        number(len(tokens), "the number of its tokens", most)
    whole = text.encode("utf-8", "replace").decode("utf-8")  # without the halves of characters that JSON can spell
    return Served(whole, tokens, number(length, "the number of generated tokens", most), counts)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _first(reply: Mapping[str, Any], http: Http) -> Mapping[str, Any]:
    choices = reply.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise TercelError(f"{http.base}/v1/completions answers without a choice; look at the server's log")
    return choices[0]


def _ids(value: Any) -> tuple[int, ...] | None:
    if isinstance(value, list) and all(type(token) is int and 0 <= token < 1 << 31 for token in value):
        return tuple(value)
    return None
