"""The one entry for training data: named sources -> token rows with masks, and an account of what became of
them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from tercel import limits
from tercel.chat.conversation import RawText, Record, TokenizedChat
from tercel.chat.overlap import Overlap, OverlapIndex
from tercel.chat.readers import read_records
from tercel.chat.render import NO_ANSWER, Rendered, Renderer, answer_text, render_plain
from tercel.chat.store import ChatStore
from tercel.chat.template import TemplateRefusalError, name_of
from tercel.chat.tokenizing import UnfitTextError
from tercel.errors import TercelError

OVERLAP = "overlaps with an evaluation set"
NOTHING_SUPERVISED = "no assistant token"
TOO_LONG = "no assistant token within the maximum length"
TOO_LARGE = f"more than {limits.TEXT_CHARACTERS:,} characters or {limits.TURNS:,} messages"
UNFIT = "the tokenizer or the chat template cannot take it"


@dataclass(frozen=True)
class LoadReport:
    """Counts of one load: `read == kept + sum(dropped.values())`, in conversations.

    `chats` token rows came of the kept ones (a template that rewrites earlier turns needs several rows for
    one conversation); `truncated` rows were cut at the maximum length. `turns` are supervised answers before
    the cut, `dropped_turns` those that could not be aligned, by reason. `tokens` and `supervised` count what
    is returned.
    """

    read: int
    kept: int
    chats: int
    truncated: int
    turns: int
    tokens: int
    supervised: int
    dropped: dict[str, int] = field(default_factory=dict)
    dropped_turns: dict[str, int] = field(default_factory=dict)
    overlaps: tuple[Overlap, ...] = ()
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def load_chats(
    sources: Sequence[str | Path],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    limit: int | None = None,
    plain: bool = False,
    last_turn: bool = False,
    against: OverlapIndex | None = None,
) -> tuple[ChatStore, LoadReport]:
    """Read sources of any known format, render and tokenise them, and mark the assistant's tokens. One row at a time is
    in memory.

    Rows longer than `max_length` tokens are cut from the right, and dropped if no assistant token is left.
    `limit`: at most that many rows of each source. `plain`: `{"text"}` rows are plain text for a base model,
    with every token but the first supervised. `last_turn`: only the answer to the last question is supervised (rows of
    token ids and plain text stay as they are). `against`: evaluation prompts; what overlaps with them is
    dropped. Raises `TercelError` for a faulty row (with file and line), for token ids that are not the
    tokenizer's, and if no assistant token is left at all.
    """
    if max_length < 2:
        raise TercelError(f"the maximum length must be at least 2 tokens, got {max_length}")
    if not sources:
        raise TercelError("no conversations are named; name a file or a data set")
    loading = _Loading(tokenizer, max_length, plain, last_turn, against)
    for source in sources:
        for record in read_records(source, limit, loading.notes):
            loading.add(record, str(source))
    report = loading.report()
    if not report.supervised:
        raise TercelError(loading.why_empty(", ".join(map(str, sources))))
    return loading.chats, report


def _is_too_large(record: Record) -> bool:
    """Whether rendering and tokenising it would take time and memory out of proportion."""
    if isinstance(record, TokenizedChat):
        return False
    if isinstance(record, RawText):
        return len(record.text) > limits.TEXT_CHARACTERS
    texts = sum(len(message.content) + len(message.reasoning_content or "") for message in record.messages)
    return texts > limits.TEXT_CHARACTERS or len(record.messages) > limits.TURNS


class _Loading:
    """The state of one `load_chats`: rows so far and the counts."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        plain: bool,
        last_turn: bool,
        against: OverlapIndex | None,
    ):
        self.tokenizer, self.max_length, self.plain, self.against = tokenizer, max_length, plain, against
        self.last_turn = last_turn
        self.chats = ChatStore()
        self.tokens = self.supervised = 0
        self.notes: list[str] = []
        self.overlaps: list[Overlap] = []
        self.read = self.kept = self.truncated = self.turns = 0
        self.dropped: Counter[str] = Counter()
        self.dropped_turns: Counter[str] = Counter()
        self._renderer: Renderer | None = None
        self._refusal = ""

    def add(self, record: Record, source: str) -> None:
        self.read += 1
        if _is_too_large(record):
            self.dropped[TOO_LARGE] += 1
            return
        if self.against is not None and (overlap := self._overlap(record, self.against)) is not None:
            self.overlaps.append(overlap)
            self.dropped[OVERLAP] += 1
            return
        try:
            rendered = self._render(record, source)
        except (UnfitTextError, TemplateRefusalError) as error:
            self._refusal = self._refusal or str(error)
            self.dropped[UNFIT] += 1
            return
        self.dropped_turns.update(rendered.dropped_turns)
        self._refusal = self._refusal or rendered.refusal
        if not any(chat.supervised.any() for chat in rendered.chats):
            lost = rendered.dropped_turns.most_common(1)
            self.dropped[lost[0][0] if lost else NO_ANSWER if not rendered.chats else NOTHING_SUPERVISED] += 1
            return
        fitting = []
        for chat in rendered.chats:
            cut = chat.cut(self.max_length)
            if cut.supervised.any():
                fitting.append(cut)
                self.truncated += len(chat) > self.max_length
        if not fitting:
            self.dropped[TOO_LONG] += 1
            return
        self.kept += 1
        self.turns += rendered.turns
        for chat in fitting:
            self.chats.add(chat)
            self.tokens += len(chat)
            self.supervised += int(chat.supervised.sum())

    def _render(self, record: Record, source: str) -> Rendered:
        if isinstance(record, TokenizedChat):
            highest = int(record.tokens.max(initial=0))
            if highest >= len(self.tokenizer):
                raise TercelError(
                    f"{source}: the tokens of {record.id} do not belong to this tokenizer (id {highest}, but "
                    f"{name_of(self.tokenizer)} has {len(self.tokenizer)} tokens); make it with this target"
                )
            return Rendered((record,), int(record.supervised.any()), Counter())
        if isinstance(record, RawText) and self.plain:
            return Rendered((render_plain(self.tokenizer, record),), 1, Counter())
        if self._renderer is None:
            self._renderer = Renderer(self.tokenizer, last_turn=self.last_turn)
        if isinstance(record, RawText):
            return self._renderer.render_text(record)
        return self._renderer.render(record)

    def _overlap(self, record: Record, against: OverlapIndex) -> Overlap | None:
        if isinstance(record, TokenizedChat):
            prompt = record.tokens[~record.supervised].tolist()
            return against.find(record.id, answer_text(self.tokenizer, prompt))
        if isinstance(record, RawText):
            return against.find(record.id, record.text)
        return against.find_in(record)

    def report(self) -> LoadReport:
        return LoadReport(
            read=self.read,
            kept=self.kept,
            chats=len(self.chats),
            truncated=self.truncated,
            turns=self.turns,
            tokens=self.tokens,
            supervised=self.supervised,
            dropped=dict(self.dropped),
            dropped_turns=dict(self.dropped_turns),
            overlaps=tuple(self.overlaps),
            notes=tuple(self.notes),
        )

    def why_empty(self, sources: str) -> str:
        reasons = ", ".join(f"{count} × {reason}" for reason, count in self.dropped.most_common())
        detail = f" ({self._refusal})" if self._refusal else ""
        return f"no assistant tokens are left of the {self.read} rows of {sources}: {reasons}{detail}"
