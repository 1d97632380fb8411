"""What travels out of the `chat` room: conversations, and token ids with a mask of the assistant's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

REASONING = ("reasoning_content", "reasoning", "thinking")  # names that servers and templates give to thoughts


@dataclass(frozen=True)
class Message:
    """One turn. `role` is what chat templates call it: "system", "user", "assistant" or "tool".

    `name`: who speaks, of a tool's answer which tool; `tool_call_id`: the id of the call that it answers.
    `token_ids`: the very ids that the target generated for this (assistant) turn, end-of-turn token included,
    where they are known; re-tokenising `content` does not always give them back.
    """

    role: str
    content: str
    tool_calls: tuple[dict[str, Any], ...] | None = None
    reasoning_content: str | None = None
    token_ids: tuple[int, ...] | None = None
    name: str | None = None
    tool_call_id: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The message as a `messages` JSONL line holds it (without `token_ids`)."""
        row: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.name is not None:
            row["name"] = self.name
        if self.tool_call_id is not None:
            row["tool_call_id"] = self.tool_call_id
        if self.reasoning_content is not None:
            row["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            row["tool_calls"] = list(self.tool_calls)
        return row


@dataclass(frozen=True)
class Conversation:
    """Turns in order; `tools` are JSON schemas (`{"type": "function", "function": {…}}`) or None."""

    id: str
    messages: tuple[Message, ...]
    source: str
    tools: tuple[dict[str, Any], ...] | None = None

    def to_json(self) -> dict[str, Any]:
        """One line of a `messages` JSONL file; reading it back gives an equal conversation."""
        row: dict[str, Any] = {"id": self.id, "source": self.source}
        if self.tools is not None:
            row["tools"] = list(self.tools)
        row["messages"] = [message.to_json() for message in self.messages]
        answers = [message.token_ids for message in self.messages if message.role == "assistant"]
        if any(ids is not None for ids in answers):
            row["answer_ids"] = [None if ids is None else list(ids) for ids in answers]
        return row


@dataclass(frozen=True)
class RawText:
    """A text that is already formatted (by a chat template, or plain text for a base model)."""

    id: str
    text: str
    source: str


@dataclass(frozen=True, eq=False)
class TokenizedChat:
    """Token ids and which of them the assistant produces.

    `tokens`: int32 `[T]`. `supervised`: bool `[T]`; `supervised[i]` says that token `i`, as a *predicted*
    token, is the assistant's: the answer and the end-of-turn token that the model emits, not the role header
    before it nor the template's text after it. It is the predicted-token mask of spec section 3.
    """

    id: str
    tokens: np.ndarray
    supervised: np.ndarray

    @staticmethod
    def of(id: str, tokens: Sequence[int], supervised: Sequence[bool]) -> TokenizedChat:
        return TokenizedChat(id, np.asarray(tokens, dtype=np.int32), np.asarray(supervised, dtype=np.bool_))

    def __len__(self) -> int:
        return len(self.tokens)

    def cut(self, length: int) -> TokenizedChat:
        """The first `length` tokens."""
        return TokenizedChat(self.id, self.tokens[:length], self.supervised[:length])

    def whole(self) -> TokenizedChat:
        """With every token supervised but the first, which nothing predicts."""
        return TokenizedChat(self.id, self.tokens, np.arange(len(self)) > 0)


Record = Conversation | RawText | TokenizedChat
