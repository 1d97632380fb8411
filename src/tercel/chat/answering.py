"""One conversation while its user turns are answered, and the row that it becomes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tercel.chat.conversation import Conversation, Message
from tercel.chat.records import parse_record
from tercel.errors import TercelError

ENDS = ("stop", "length")


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

    def take(self, answer: Message, finish: str) -> None:
        self.done.append(answer)
        self.finish.append(finish)

    def row(self) -> dict[str, Any]:
        """A line of a `messages` JSONL file, with the `finish` of every answer."""
        return {**replace(self.source, messages=tuple(self.done)).to_json(), "finish": self.finish}


TextOf = Callable[[Sequence[int]], str]


def answer_of(token_ids: Sequence[int], text_of: TextOf) -> Message:
    """The assistant's message of these generated ids; text_of: their text."""
    return Message("assistant", text_of(token_ids), token_ids=tuple(token_ids))


def row_problem(row: dict[str, Any], source: Conversation, text_of: TextOf | None) -> str:
    """Why `row` is not what becomes of `source`, as a clause; "" if it is. text_of: the text of generated ids; None
    where answers are known by their text alone.

    All but the answers, and how they ended, follows from the source; a context that was full may have left the last
    questions unanswered.
    """
    finish = row.get("finish")
    try:
        answers = _texts(row) if text_of is None else _of_ids(row, text_of)
    except TercelError as error:
        return str(error)
    if not isinstance(finish, list) or len(finish) != len(answers) or not all(end in ENDS for end in finish):
        return 'its finish does not say "stop" or "length" of each answer'
    state = Answering.of(source)
    if state is None:
        return "its prompt asks nothing"
    for answer, end in zip(answers, finish, strict=True):
        context = state.asked()
        if context is None:
            return "it has more answers than questions"
        state.ask(context)
        state.take(answer, end)
    if json.dumps(state.row(), sort_keys=True) != json.dumps(row, sort_keys=True):
        return "it is not its prompt with " + ("answers" if text_of is None else "the text of its answer_ids")
    return ""


def _of_ids(row: dict[str, Any], text_of: TextOf) -> list[Message]:
    answers: Any = row.get("answer_ids")
    if not _are_ids(answers):
        raise TercelError("its answer_ids are not the token ids of its answers")
    return [answer_of(ids, text_of) for ids in answers]


def _texts(row: dict[str, Any]) -> list[Message]:
    record = parse_record(row, where="it", default_id="", default_source="")
    if not isinstance(record, Conversation):
        raise TercelError("it is not a conversation")
    return [message for message in record.messages if message.role == "assistant"]


def _are_ids(answers: Any) -> bool:
    """Whether this is a list, not empty, of such lists of token ids."""
    if not isinstance(answers, list) or not answers:
        return False
    return all(isinstance(ids, list) and ids and all(type(i) is int and 0 <= i < 2**31 for i in ids) for ids in answers)
