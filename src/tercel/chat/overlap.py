"""Training prompts that also occur in evaluation sets: equal, nearly equal, or sharing a run of words."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tercel import limits
from tercel.chat.conversation import Conversation
from tercel.chat.readers import read_conversations
from tercel.errors import TercelError

# A word; scripts written without spaces (Chinese, Japanese, Thai, Lao, Khmer, Burmese) count by character.
UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
WORD = re.compile(f"[{UNSPACED}]|[^\\W{UNSPACED}]+")
SHINGLE = 3  # words; nearness is the Jaccard similarity of the sets of 3-word runs
NEAR = 0.8
PROMPT_ROLES = ("user", "system")


@dataclass(frozen=True)
class EvalPrompt:
    id: str  # "file name:question id, turn N"
    text: str


@dataclass(frozen=True)
class Overlap:
    """Conversation `id` overlaps with `eval_id`: kind "exact", "near" or "ngram"; `shared` shows how."""

    id: str
    kind: str
    eval_id: str
    shared: str


@dataclass(frozen=True)
class OverlapReport:
    read: int
    kept: tuple[Conversation, ...]
    overlaps: tuple[Overlap, ...]

    @property
    def counts(self) -> dict[str, int]:
        """Removed conversations by kind."""
        return dict(Counter(overlap.kind for overlap in self.overlaps))


@dataclass
class OverlapIndex:
    """Evaluation prompts, prepared for look-up: whole prompts, runs of `n` words, and 3-word runs for
    nearness."""

    n: int = 13
    prompts: list[EvalPrompt] = field(default_factory=list)
    _whole: dict[tuple[str, ...], int] = field(default_factory=dict)
    _grams: dict[tuple[str, ...], int] = field(default_factory=dict)
    _shingles: dict[tuple[str, ...], list[int]] = field(default_factory=lambda: defaultdict(list))
    _sizes: list[int] = field(default_factory=list)

    @staticmethod
    def of(prompts: Iterable[EvalPrompt], n: int = 13) -> OverlapIndex:
        """Raises `TercelError` if `n` is below 2 or no prompt has a word in it."""
        if n < 2:
            raise TercelError(f"overlap needs runs of at least 2 words, got n={n}")
        index = OverlapIndex(n)
        for prompt in prompts:
            index._add(prompt)
        if not index.prompts:
            raise TercelError('the evaluation files hold no prompts; expected "turns" or user messages')
        return index

    def _add(self, prompt: EvalPrompt) -> None:
        words = _words(prompt.text)
        if not words:
            return
        number = len(self.prompts)
        self.prompts.append(prompt)
        self._whole.setdefault(words, number)
        for gram in _runs(words, self.n):
            self._grams.setdefault(gram, number)
        shingles = _runs(words, SHINGLE)
        self._sizes.append(len(shingles))
        for shingle in shingles:
            self._shingles[shingle].append(number)

    def find(self, id: str, text: str) -> Overlap | None:
        """The first overlap of one prompt, the strongest kind first, or None."""
        words = _words(text)
        if words in self._whole:
            return Overlap(id, "exact", self.prompts[self._whole[words]].id, _cut(text))
        shingles = self._near_runs(words)
        common = Counter(number for run in shingles for number in self._shingles.get(run, ()))
        for number, shared in common.most_common(8):
            similarity = shared / (len(shingles) + self._sizes[number] - shared)
            if similarity >= NEAR:
                return Overlap(id, "near", self.prompts[number].id, f"{similarity:.0%} alike: {_cut(text)}")
        for gram in _in_order(words, self.n):
            if gram in self._grams:
                return Overlap(id, "ngram", self.prompts[self._grams[gram]].id, " ".join(gram))
        return None

    def _near_runs(self, words: tuple[str, ...]) -> set[tuple[str, ...]]:
        """The 3-word runs; none of a text with too many of them to be near to any prompt."""
        runs: set[tuple[str, ...]] = set()
        most = max(self._sizes) / NEAR
        for run in _in_order(words, SHINGLE):
            runs.add(run)
            if len(runs) > most:
                return set()
        return runs

    def find_in(self, conversation: Conversation) -> Overlap | None:
        """The first overlap of any user or system turn of a conversation, or None."""
        for message in conversation.messages:
            if message.role in PROMPT_ROLES and (overlap := self.find(conversation.id, message.content)):
                return overlap
        return None


def find_overlaps(
    conversations: Iterable[Conversation], eval_prompts: Iterable[EvalPrompt], n: int = 13
) -> OverlapReport:
    """Split conversations into those to keep and those whose prompts overlap with evaluation prompts.

    A user or system turn overlaps if its words equal an evaluation prompt's (case, spaces and punctuation
    aside), if at least 80 % of their 3-word runs agree (Jaccard), or if it shares a run of `n` words.
    """
    index = OverlapIndex.of(eval_prompts, n)
    read, kept, overlaps = 0, [], []
    for conversation in conversations:
        read += 1
        overlap = index.find_in(conversation)
        if overlap is None:
            kept.append(conversation)
        else:
            overlaps.append(overlap)
    return OverlapReport(read, tuple(kept), tuple(overlaps))


def read_eval_prompts(files: Sequence[str | Path]) -> list[EvalPrompt]:
    """Every user turn of evaluation files: `{"turns": […]}` or `messages` JSONL."""
    prompts = []
    for name in files:
        for conversation in read_conversations(name):
            asked = [message for message in conversation.messages if message.role == "user"]
            for turn, message in enumerate(asked, 1):
                if len(message.content) > limits.TEXT_CHARACTERS:
                    raise TercelError(
                        f"{name}: turn {turn} of {conversation.id} has more than {limits.TEXT_CHARACTERS:,} "
                        "characters, which no question has; remove it"
                    )
                prompts.append(EvalPrompt(f"{Path(name).name}:{conversation.id}, turn {turn}", message.content))
    return prompts


def _words(text: str) -> tuple[str, ...]:
    return tuple(WORD.findall(text.lower()))


def _in_order(words: tuple[str, ...], n: int) -> Iterable[tuple[str, ...]]:
    return (words[i : i + n] for i in range(len(words) - n + 1))


def _runs(words: tuple[str, ...], n: int) -> set[tuple[str, ...]]:
    return set(_in_order(words, n))


def _cut(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 80 else line[:77] + "..."
