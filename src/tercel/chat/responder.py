"""What answers questions, whatever is behind it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from tercel.chat.conversation import Message

SHOWN_EVERY = 1.0  # seconds, so that whoever waits is told how it goes


@dataclass(frozen=True)
class Question:
    """messages: up to a user's turn. tools: as in `Conversation`. prompt_ids: both as the target's template renders
    them, generation prompt included; empty where there is no template, and whoever answers has its own."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] | None
    prompt_ids: tuple[int, ...]


@dataclass(frozen=True)
class Answer:
    """What came of a question. `token_ids`: generated ids, the end-of-turn token included if it was generated.

    `finish`: "stop", "length", or "error:<what went wrong>". `said`: the answer where its ids are not known, `length`
    then how many there were, as far as that is told.
    """

    key: str
    token_ids: tuple[int, ...]
    finish: str
    said: Message | None = None
    length: int = 0


class Responder(Protocol):
    """A small scheduler over whatever generates; it batches as it likes and answers in any order."""

    def submit(self, key: str, question: Question) -> None:
        """Take a question; its key comes back in the `Answer`."""

    def poll(self) -> list[Answer]:
        """Work until a question is answered, or for about `SHOWN_EVERY` seconds, and return what is answered."""

    def pending(self) -> int:
        """How many questions are submitted and not yet returned by `poll`."""

    def generated(self) -> int:
        """How many tokens were made so far, those of answers that go on included, as far as that is known."""
