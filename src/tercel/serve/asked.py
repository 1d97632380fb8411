"""From the body of a request to what the loop decodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from tercel.decode.generation_config import Asked
from tercel.decode.sampling import SamplingParams
from tercel.decode.stopping import StopChecker
from tercel.decode.types import Request
from tercel.serve.failures import ApiError, fault_of
from tercel.serve.grammar import Grammar, Grammars
from tercel.serve.prompts import Prompter
from tercel.serve.schema import Asking, ChatRequest, CompletionRequest, NamedTool
from tercel.serve.settings import ServerSettings
from tercel.serve.tools import CallFormat, learn_calls
from tercel.target_model.protocol import TargetModel

COMPLETION_TOKENS = 16  # where a completion asks for no number, as OpenAI has it
_LEAST = 1e-9  # a nucleus of one token
_ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True)
class Job:
    """What one HTTP request has decoded: `len(prompts)` times `n` answers, those of a prompt together.

    calls, tools: how calls are found in the answers, and of which functions; None and () if nobody looks.
    """

    prompts: tuple[tuple[int, ...], ...]
    requests: tuple[Request, ...]
    draft: bool
    calls: CallFormat | None = None
    tools: tuple[str, ...] = ()


class Reader:
    """Makes jobs for one target; in any thread."""

    def __init__(self, target: TargetModel, settings: ServerSettings) -> None:
        self._target, self._settings = target, settings
        self._prompter = Prompter(target.tokenizer)
        self._grammars = Grammars(target)

    def chat(self, asked: ChatRequest) -> Job:
        """Raises `ApiError` for anything that cannot be answered as it is asked for."""
        self._check_count(asked, 1)
        prompt = tuple(self._prompter.chat(asked))
        if asked.top_logprobs is not None and not asked.logprobs:
            raise ApiError("top_logprobs needs logprobs: true", param="top_logprobs")
        if asked.max_tokens is not None and asked.max_completion_tokens is not None:
            raise ApiError("give max_completion_tokens or max_tokens, not both", param="max_tokens")
        most = asked.max_completion_tokens or asked.max_tokens
        logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
        if not asked.tools and asked.tool_choice not in (None, "auto", "none"):
            raise ApiError("tool_choice needs tools", param="tool_choice")
        looks = bool(asked.tools) and asked.tool_choice != "none"
        grammar = self._call_grammar(asked) if looks else None
        if grammar is None:
            grammar = self._answer_grammar(asked)
        elif self._answer_grammar(asked) is not None:
            raise ApiError("tool_choice and response_format ask for two forms; give one", param="response_format")
        job = self._job(asked, [prompt], most, Request(prompt, logprobs=logprobs, constraint=grammar))
        if not looks:
            return job
        names = tuple(tool["function"]["name"] for tool in asked.tools or ())
        return replace(job, calls=self._calls, tools=names)

    def completion(self, asked: CompletionRequest) -> Job:
        """Raises as `chat`."""
        if asked.suffix:
            raise ApiError("the model fills no gaps; leave suffix out", param="suffix")
        if asked.best_of not in (None, asked.n or 1):
            raise ApiError("best_of is not offered beyond n; leave it out", param="best_of")
        given: Any = asked.prompt
        several = given if isinstance(given, list) and given and not isinstance(given[0], int) else [given]
        self._check_count(asked, len(several))
        prompts = [tuple(self._prompter.text(one) if isinstance(one, str) else one) for one in several]
        most = COMPLETION_TOKENS if asked.max_tokens is None else max(asked.max_tokens, 1)
        like = Request((), logprobs=asked.logprobs, echo=bool(asked.echo), constraint=self._answer_grammar(asked))
        return self._job(asked, prompts, most, like)

    @cached_property
    def _calls(self) -> CallFormat | None:
        return learn_calls(self._target.tokenizer)

    def _job(self, asked: Asking, prompts: Sequence[tuple[int, ...]], most: int | None, like: Request) -> Job:
        count = asked.n or 1
        if like.constraint is not None and asked.ignore_eos:
            raise ApiError("ignore_eos lets no form end; leave it or response_format out", param="ignore_eos")
        requests = []
        for prompt in prompts:
            self._check(prompt, "messages" if isinstance(asked, ChatRequest) else "prompt")
            room = self._target.context_length - len(prompt)
            params = self._params(asked, min(most or room, room))
            for number in range(count):
                seed = None if params.seed is None else (params.seed + number) % (1 << 64)
                own = replace(params, seed=seed)
                requests.append(replace(like, prompt=prompt, params=own, traced=bool(asked.stream and asked.trace)))
        return Job(tuple(prompts), tuple(requests), asked.draft is not False)

    def _check(self, prompt: tuple[int, ...], param: str) -> None:
        limit = self._target.context_length
        if not prompt:
            raise ApiError("the prompt is empty; give at least one token", param=param)
        if len(prompt) >= limit:
            raise ApiError(
                f"the prompt has {len(prompt):,} tokens, but the model takes {limit:,} with the answer; shorten it",
                code="context_length_exceeded",
                param=param,
            )
        if max(prompt) >= self._target.vocab_size:
            raise ApiError(f"the prompt holds token id {max(prompt)}, which the model has not", param=param)

    def _params(self, asked: Asking, most: int) -> SamplingParams:
        """Temperature is 1 where none is given, as OpenAI has it, or what the model's generation config says."""
        seed, top_p = asked.seed, asked.top_p
        given = {
            "temperature": asked.temperature,
            "top_k": None if asked.top_k is None else max(asked.top_k, 0),
            "top_p": _LEAST if top_p == 0 else top_p,
            "min_p": asked.min_p,
            "repetition_penalty": asked.repetition_penalty,
            "presence_penalty": asked.presence_penalty,
            "frequency_penalty": asked.frequency_penalty,
            "logit_bias": self._bias(asked.logit_bias),
            "seed": None if seed is None else seed % (1 << 64),
            "max_new_tokens": most,
            "stop": (asked.stop,) if isinstance(asked.stop, str) else None if asked.stop is None else tuple(asked.stop),
            "stop_token_ids": None if asked.stop_token_ids is None else tuple(asked.stop_token_ids),
            "ignore_eos": asked.ignore_eos,
        }
        wanted: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        for name, value in wanted.items():
            with fault_of(name):
                SamplingParams(**{name: value})
        with fault_of(None):
            sample = asked.temperature is None or asked.temperature > 0
            params = Asked(wanted, sample).of(self._target).params
        if asked.stop is not None:
            with fault_of("stop"):  # which the tokenizer has a say in
                StopChecker(params, self._target.eos_token_ids, self._target.tokenizer)
        if asked.min_tokens:
            params = replace(params, rules=replace(params.rules, min_new_tokens=asked.min_tokens))
        return params

    def _bias(self, given: dict[str, float] | None) -> dict[int, float] | None:
        if given is None:
            return None
        size = self._target.vocab_size
        if any(not token.isascii() or not token.isdigit() or int(token) >= size for token in given):
            raise ApiError(f"logit_bias maps token ids, from 0 to {size - 1:,}, to numbers", param="logit_bias")
        return {int(token): value for token, value in given.items()}

    def _answer_grammar(self, asked: Asking) -> Grammar | None:
        form = asked.response_format
        if form is None or form.type == "text":
            return None
        if form.type == "json_object":
            return self._grammars.of_schema(_ANY_OBJECT)
        if form.json_schema is None or form.json_schema.schema_ is None:
            raise ApiError("response_format json_schema needs json_schema.schema", param="response_format")
        return self._grammars.of_schema(form.json_schema.schema_)

    def _call_grammar(self, asked: ChatRequest) -> Grammar | None:
        """Of an answer that has to be a call; None if it only may be one."""
        choice, tools = asked.tool_choice, asked.tools or []
        if choice in (None, "auto", "none"):
            return None
        if isinstance(choice, NamedTool):
            tools = [tool for tool in tools if tool["function"]["name"] == choice.function.name]
            if not tools:
                raise ApiError(f"tool_choice names no tool that is given: {choice.function.name}", param="tool_choice")
        if self._calls is None or not self._calls.plain:
            raise ApiError(
                "the model's chat template does not say how a call is written, so none can be required; give auto",
                param="tool_choice",
            )
        return self._grammars.of_lark(self._calls.lark(tools), "tool_choice")

    def _check_count(self, asked: Asking, prompts: int) -> None:
        most = self._settings.choices
        if prompts * (asked.n or 1) > most:
            param = "prompt" if prompts > most else "n"
            raise ApiError(f"a request may ask for {most} answers at most", param=param)
