"""The bodies of requests: OpenAI's fields, and those that vLLM adds to them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tercel.serve.failures import ApiError

ALTERNATIVES = 20  # of a token, as OpenAI has it
_TEXTS, _TEXT = 64, 1000  # stop strings, and characters of one
# fields of others that change no text here
_IGNORED = {
    *("audio", "metadata", "modalities", "parallel_tool_calls", "prediction", "prompt_cache_key", "reasoning_effort"),
    *("safety_identifier", "service_tier", "store", "user", "verbosity", "web_search_options"),
}

StopText = Annotated[str, Field(min_length=1, max_length=_TEXT)]
Ids = list[Annotated[int, Field(ge=0, lt=1 << 31)]]


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())


class StreamOptions(_Part):
    include_usage: bool = False


class JsonSchema(_Part):
    name: str = ""
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class ResponseFormat(_Part):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class NamedFunction(_Part):
    name: str


class NamedTool(_Part):
    type: Literal["function"]
    function: NamedFunction


class Asking(_Part):
    """What both kinds of requests have. Beyond OpenAI's: min_p, top_k, repetition_penalty, min_tokens, stop_token_ids,
    ignore_eos, return_token_ids (vLLM's), and draft: false decodes token by token, without drafts; trace: true adds to
    every piece of a stream the record of its step, and that as HTML (docs/explain.md)."""

    model: str | None = None
    n: int | None = Field(None, ge=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=_TEXTS)] | None = None
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 64)
    temperature: float | None = None
    top_p: float | None = None
    min_p: float | None = None
    top_k: int | None = Field(None, ge=-1)
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=1024)] | None = None
    response_format: ResponseFormat | None = None
    min_tokens: int | None = Field(None, ge=0)
    stop_token_ids: Annotated[Ids, Field(max_length=_TEXTS)] | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    draft: bool | None = None
    trace: bool | None = None


class ChatRequest(Asking):
    """Of /v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=ALTERNATIVES)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    allow_special_tokens: bool | None = None


class CompletionRequest(Asking):
    """Of /v1/completions. prompt: a text, several, token ids, or several lists of them."""

    prompt: str | Annotated[list[str], Field(min_length=1)] | Ids | Annotated[list[Ids], Field(min_length=1)]
    max_tokens: int | None = Field(None, ge=0)
    logprobs: int | None = Field(None, ge=0, le=ALTERNATIVES)
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None


Body = TypeVar("Body", bound=Asking)


def read(kind: type[Body], value: Any) -> Body:
    """The request in a body's JSON. A field that nobody knows is let be, as every server of this interface does, unless
    it looks like a known one misspelt. Raises `ApiError` that names the first field that is wrong."""
    if not isinstance(value, dict):
        raise ApiError("the body must be a JSON object")
    try:
        request = kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ApiError(f"{place}: {_told(first['msg'])}", param=place.partition(".")[0]) from None
    unknown = (name for name in request.model_extra or () if name not in _IGNORED)
    for name, near in _slips(unknown, kind.model_fields):
        raise ApiError(f"there is no field {name[:80]!r}; did you mean {near!r}?", param=name[:80])
    for name, instead in (("functions", "tools"), ("function_call", "tool_choice")):
        if value.get(name) is not None:
            raise ApiError(f"the field {name!r} is of an earlier interface; give {instead!r}", param=name)
    return request


def _slips(unknown: Iterable[str], known: Iterable[str]) -> Iterable[tuple[str, str]]:
    for name in unknown:
        if near := difflib.get_close_matches(name, known, n=1, cutoff=0.85):
            yield name, near[0]


def _told(message: str) -> str:
    return message[:1].lower() + message[1:]
