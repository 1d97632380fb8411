"""Running servers of three engines: greedy answers to token ids, and how many drafts were accepted for them.

vLLM       counters at /metrics (`vllm:spec_decode_*`), read before and after every answer
SGLang     `meta_info` of /generate: a histogram of accepted drafts a step
llama.cpp  `timings` of /completion; with `--metrics` the counters `llamacpp:spec_decode_*` as well
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from tercel.deploy.http import Http, HttpStatusError
from tercel.errors import TercelError

EngineName = Literal["vllm", "sglang", "llamacpp"]
_LINE = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*)(\{(?P<labels>.*)\})?\s+(?P<value>[-+.\w]+)")
_POSITION = re.compile(r'position="(\d+)"')


@dataclass(frozen=True)
class Counts:
    """drafts: steps that verified a draft; drafted, accepted: tokens; per_position: accepted ones by place in the
    chain, None where the engine does not tell."""

    drafts: float = 0.0
    drafted: float = 0.0
    accepted: float = 0.0
    per_position: tuple[float, ...] | None = None

    def since(self, before: Counts) -> Counts:
        positions = self.per_position
        if positions is not None and before.per_position is not None:
            padded = (*before.per_position, *(0.0,) * len(positions))  # a position may appear with its first draft
            positions = tuple(now - old for now, old in zip(positions, padded, strict=False))
        return Counts(
            self.drafts - before.drafts, self.drafted - before.drafted, self.accepted - before.accepted, positions
        )


@dataclass(frozen=True)
class Draft:
    """The shape of a server's drafts, as far as it tells: depth of the chain; for a tree also top_k and nodes, root
    included."""

    depth: int
    top_k: int = 1
    nodes: int = 0


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

    def draft(self) -> Draft | None:
        """What is drafted, if that can be known before an answer."""
        ...

    def answer(self, prompt: Sequence[int], max_new_tokens: int) -> Served: ...

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]]) -> SeenPrompt: ...


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


def read_counters(text: str, prefix: str) -> Counts | None:
    """`{prefix}:spec_decode_*` of a Prometheus page, all engines of the server summed; None if it has none."""
    sums: dict[str, float] = {}
    positions: dict[int, float] = {}
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None or not match["name"].startswith(f"{prefix}:spec_decode_"):
            continue
        name, value = match["name"].removeprefix(f"{prefix}:spec_decode_"), float(match["value"])
        place = _POSITION.search(match["labels"] or "")
        if name == "num_accepted_tokens_per_pos_total" and place:
            positions[int(place[1])] = positions.get(int(place[1]), 0.0) + value
        else:
            sums[name] = sums.get(name, 0.0) + value
    if "num_drafts_total" not in sums:
        return None
    return Counts(
        sums["num_drafts_total"],
        sums.get("num_draft_tokens_total", 0.0),
        sums.get("num_accepted_tokens_total", 0.0),
        tuple(positions[i] for i in sorted(positions)) or None,
    )


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
        if not isinstance(models, list) or not models or not isinstance(models[0], dict) or "id" not in models[0]:
            raise TercelError(f"{self.http.base}/v1/models names no model; is it a server of vLLM?")
        return str(models[0]["id"])

    def draft(self) -> Draft | None:
        positions = self._counters().per_position
        return Draft(len(positions)) if positions else None

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
        choice, usage = _first(reply, self.http), reply.get("usage") or {}
        tokens = _ids(choice.get("token_ids"))
        length = len(tokens) if tokens is not None else int(usage.get("completion_tokens", 0))
        return Served(str(choice.get("text", "")), tokens, length, self._counters().since(before))

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]]) -> SeenPrompt:
        return _openai_prompt(self.http, self._model(), messages)


@dataclass(frozen=True)
class Sglang:
    http: Http
    engine: EngineName = "sglang"

    def draft(self) -> Draft | None:
        """Raises `TercelError` for a server that runs without drafts."""
        try:
            info = self.http.get("/server_info")
        except HttpStatusError:
            info = self.http.get("/get_server_info")  # until 2025
        depth, top_k = info.get("speculative_num_steps"), info.get("speculative_eagle_topk")
        if not isinstance(depth, int) or depth < 1:
            raise TercelError(
                f"the server at {self.http.base} runs without speculative decoding; start it with the line that "
                "`tercel serve-command HEAD --engine sglang` prints"
            )
        nodes = info.get("speculative_num_draft_tokens")
        return Draft(depth, top_k or 1, nodes if isinstance(nodes, int) else depth + 1)

    def answer(self, prompt: Sequence[int], max_new_tokens: int) -> Served:
        sampling = {"temperature": 0.0, "max_new_tokens": max_new_tokens}
        reply = self.http.post("/generate", {"input_ids": list(prompt), "sampling_params": sampling})
        meta = reply.get("meta_info")
        if not isinstance(meta, dict) or not isinstance(meta.get("completion_tokens"), int):
            raise TercelError(f"{self.http.base}/generate answers without meta_info; is it a server of SGLang?")
        length = int(meta["completion_tokens"])
        tokens = _ids(reply.get("output_ids"))
        return Served(str(reply.get("text", "")), tokens, length, self._counts(meta, length))

    def _counts(self, meta: Mapping[str, Any], length: int) -> Counts:
        histogram = meta.get("spec_correct_drafts_histogram")  # [a]: steps with a accepted drafts
        drafted = float(meta.get("spec_num_proposed_drafts") or 0)
        if isinstance(histogram, list) and histogram:
            beyond = [float(sum(histogram[i + 1 :])) for i in range(len(histogram) - 1)]
            return Counts(float(sum(histogram)), drafted, sum(beyond), tuple(beyond))
        steps = meta.get("spec_verify_ct")
        if not isinstance(steps, int):
            return Counts()
        # older servers tell the steps alone: each gives its accepted drafts and one token more
        return Counts(float(steps), drafted, max(0.0, float(length - 1 - steps)))

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]]) -> SeenPrompt:
        return _openai_prompt(self.http, "default", messages)


@dataclass(frozen=True)
class LlamaCpp:
    http: Http
    engine: EngineName = "llamacpp"

    def _counters(self) -> Counts | None:
        """None for a server that was started without `--metrics`."""
        return read_counters(_tried(self.http, "/metrics"), "llamacpp")

    def draft(self) -> Draft | None:
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
        timings = reply.get("timings")
        if not isinstance(timings, dict) or "predicted_n" not in timings:
            raise TercelError(f"{self.http.base}/completion answers without timings; is it a server of llama.cpp?")
        length, drafted = int(timings["predicted_n"]), float(timings.get("draft_n", 0))
        accepted, after = float(timings.get("draft_n_accepted", 0)), self._counters()
        steps = float(max(0, length - 1 - accepted)) if drafted else 0.0
        counts = after.since(before) if after and before else Counts(steps, drafted, accepted)
        return Served(str(reply.get("content", "")), _ids(reply.get("tokens")) or None, length, counts)

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]]) -> SeenPrompt:
        text = self.http.post("/apply-template", {"messages": [dict(m) for m in messages]}).get("prompt")
        body = {"content": text, "add_special": True, "parse_special": True}  # as its own chat route does
        tokens = _ids(self.http.post("/tokenize", body).get("tokens"))
        if tokens is None:
            raise TercelError(f"{self.http.base}/tokenize gives no tokens; is it a server of llama.cpp?")
        return SeenPrompt(tokens, len(tokens))


def _openai_prompt(http: Http, model: str, messages: Sequence[Mapping[str, Any]]) -> SeenPrompt:
    body = {
        "model": model,
        "messages": [dict(m) for m in messages],
        "max_tokens": 1,
        "temperature": 0.0,
        "return_token_ids": True,
    }
    reply = http.post("/v1/chat/completions", body)
    tokens, usage = _ids(reply.get("prompt_token_ids")), reply.get("usage") or {}
    return SeenPrompt(tokens, len(tokens) if tokens is not None else int(usage.get("prompt_tokens", 0)))


def _first(reply: Mapping[str, Any], http: Http) -> Mapping[str, Any]:
    choices = reply.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise TercelError(f"{http.base}/v1/completions answers without a choice; look at the server's log")
    return choices[0]


def _ids(value: Any) -> tuple[int, ...] | None:
    if isinstance(value, list) and all(isinstance(token, int) for token in value):
        return tuple(value)
    return None
