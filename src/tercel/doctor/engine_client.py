"""What a client of a running engine is, and what all of them read in the same way.

A client gives greedy answers to token ids, and how many drafts were accepted for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from tercel.draft.shape import TreeShape
from tercel.errors import TercelError
from tercel.http.client import Http, HttpStatusError
from tercel.measure.counts import MAX_DEPTH, Counts, number

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


class EngineClient(Protocol):
    """All calls raise `TercelError` for a server that fails, or whose answers are not those of its engine."""

    engine: ClassVar[str]
    """The engine's name, which also begins the names of its counters."""

    def __init__(self, http: Http) -> None: ...

    @staticmethod
    def answers_at(http: Http) -> bool:
        """Whether a server without counters is this engine's, by what no other engine has."""
        ...

    def draft(self) -> TreeShape | None:
        """What is drafted, if that can be known before an answer."""
        ...

    def answer(self, prompt: Sequence[int], max_new_tokens: int) -> Served: ...

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]) -> SeenPrompt: ...


def tried(http: Http, path: str) -> str:
    """The text at `path`; empty if the server has no such place."""
    try:
        return http.text(path)
    except HttpStatusError:
        return ""


def template_kwargs(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """How a request gives the chat template arguments beside the messages, in all three engines."""
    return {"chat_template_kwargs": dict(arguments)} if arguments else {}


def openai_prompt(
    http: Http, model: str, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]
) -> SeenPrompt:
    body = {
        "model": model,
        "messages": [dict(m) for m in messages],
        "max_tokens": 1,
        "temperature": 0.0,
        "return_token_ids": True,
        **template_kwargs(arguments),
    }
    reply = http.post("/v1/chat/completions", body)
    tokens, usage = ids(reply.get("prompt_token_ids")), mapping(reply.get("usage"))
    length = len(tokens) if tokens is not None else number(usage.get("prompt_tokens", 0), "prompt_tokens")
    return SeenPrompt(tokens, length)


def most_tokens(tokens: int) -> int:
    """Tokens that an answer of at most `tokens` can have: a step may run past the end by what it drafted."""
    return tokens + MAX_DEPTH


def served(text: Any, tokens: tuple[int, ...] | None, length: Any, asked: int, counts: Counts) -> Served:
    """Raises `TercelError` for an answer that is longer than one of `asked` tokens can be, or no text."""
    most, text = most_tokens(asked), "" if text is None else text
    if not isinstance(text, str):
        raise TercelError(f"the server answers with a {type(text).__name__} in the place of text; look at its log")
    number(len(text), "the length of its text", most * _TOKEN_LENGTH)
    if tokens is not None:
        number(len(tokens), "the number of its tokens", most)
    whole = text.encode("utf-8", "replace").decode("utf-8")  # without the halves of characters that JSON can spell
    return Served(whole, tokens, number(length, "the number of generated tokens", most), counts)


def mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def first(reply: Mapping[str, Any], http: Http) -> Mapping[str, Any]:
    choices = reply.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise TercelError(f"{http.base}/v1/completions answers without a choice; look at the server's log")
    return choices[0]


def ids(value: Any) -> tuple[int, ...] | None:
    if isinstance(value, list) and all(type(token) is int and 0 <= token < 1 << 31 for token in value):
        return tuple(value)
    return None
