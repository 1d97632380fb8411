"""One conversation while its user turns are answered, and the row that it becomes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from tercel.chat.conversation import Conversation, Message


@dataclass
class Answering:
    """`left` are source messages not yet taken over, `done` is the context, `finish` how each answer ended."""

    source: Conversation
    left: list[Message]
    done: list[Message] = field(default_factory=list)
    finish: list[str] = field(default_factory=list)

    @staticmethod
    def of(source: Conversation) -> Answering | None:
        """The source without its assistant and tool turns; None if it asks nothing."""
        left = [m for m in source.messages if m.role not in ("assistant", "tool")]
        while left and left[-1].role != "user":
            left.pop()  # a system message that no question follows
        return Answering(source, left) if left else None

    def asked(self) -> list[Message] | None:
        """The context up to the next user turn; None if all are answered."""
        upto = next((i + 1 for i, m in enumerate(self.left) if m.role == "user"), 0)
        return [*self.done, *self.left[:upto]] if upto else None

    def ask(self, context: list[Message]) -> None:
        """Take over what `asked` gave."""
        self.left = self.left[len(context) - len(self.done) :]
        self.done = context

    def take(self, text: str, token_ids: tuple[int, ...], finish: str) -> None:
        self.done.append(Message("assistant", text, token_ids=token_ids))
        self.finish.append(finish)

    def row(self) -> dict[str, Any]:
        """A line of a `messages` JSONL file, with the `finish` of every answer."""
        return {**replace(self.source, messages=tuple(self.done)).to_json(), "finish": self.finish}
