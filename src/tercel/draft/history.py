"""What `tercel.json` records of a head's training and of what was measured on it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from tercel.draft.json_record import ADVICE, JsonRecord
from tercel.errors import TercelError

TRAINED, FROZEN = "trained", "frozen"  # what a record says of a head's own embeddings


@dataclass(frozen=True, kw_only=True)
class TemplateRecord(JsonRecord):
    """The chat template of training: short digests of its source and of what it makes of a fixed conversation
    (`chat.identity`); arguments: what it was given beside the messages."""

    source: str
    rendered: str
    arguments: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Recipe(JsonRecord):
    """The settings of training that a card tells; the others are kept as they are. Before optimizers and methods could
    be chosen, there were AdamW and EAGLE-3's alone."""

    epochs: float
    lr: float
    clip: float
    ttt_steps: int
    decay: float
    loss: str
    max_length: int
    optimizer: str = "adamw"
    method: str = "eagle3"


@dataclass(frozen=True, kw_only=True)
class TrainingRecord(JsonRecord):
    """What a head learned from, and how; None where that is not recorded.

    made_by: another maker, whose files say little more than target_name. data: names of files and data sets;
    rendered_at: what their template took for now (ISO), if it writes the date. conversations, tokens: learned from,
    held_out_conversations: not; supervised_tokens: the assistant's; draft_vocabulary_coverage: the share of those that
    can be drafted. steps: planned, step: done. embeddings: of a head with its own, whether they learned.
    """

    made_by: str | None = None
    target_name: str | None = None
    data: tuple[str, ...] | None = None
    data_licence: str | None = None
    rendered_at: str | None = None
    conversations: int | None = None
    held_out_conversations: int | None = None
    tokens: int | None = None
    supervised_tokens: int | None = None
    draft_vocabulary_coverage: float | None = None
    dtype: str | None = None
    steps: int | None = None
    chat_template: TemplateRecord | None = None
    recipe: Recipe | None = None
    embeddings: str | None = None
    step: int | None = None

    # what is never recorded without the others
    _TOGETHER: ClassVar = {
        "conversations": ("data", "tokens", "supervised_tokens"),
        "recipe": ("step", "steps", "dtype", "draft_vocabulary_coverage"),
    }

    @classmethod
    def from_json(cls, value: Any, place: str, path: Path) -> Self:
        record = super().from_json(value, place, path)
        for name, others in cls._TOGETHER.items():
            for other in others:
                if name in value and other not in value:
                    raise TercelError(f"{place} in {path} has {name} but no {other}; {ADVICE}")
        return record


@dataclass(frozen=True, kw_only=True)
class HeldOut(JsonRecord):
    """What a decoder of greedy chains of `S` drafts gains on answers that were held out of training.

    alpha: n-α for n = 0..S-1, the share of accepted drafts at depth `n` of its chains where all before were accepted
    (0 where none was tried; a draft past the answer's end is none). tau: tokens a target forward, its own included;
    the first token of an answer is prefill's. steps: target forwards it was measured on. loss: the objective's, over
    all that was held out. rows: of heads of earlier versions, in place of steps: there, `tau` and `alpha` are means
    over all places.
    """

    alpha: tuple[float, ...]
    tau: float
    steps: int | None = None
    loss: float | None = None
    rows: int | None = None

    @classmethod
    def from_json(cls, value: Any, place: str, path: Path) -> Self:
        record = super().from_json(value, place, path)
        if record.steps is None and record.rows is None:
            raise TercelError(f"{place} in {path} has no steps; {ADVICE}")
        return record


@dataclass(frozen=True, kw_only=True)
class TaskRecord(JsonRecord):
    """A task of a benchmark: acceptance length and speedup over token-by-token decoding, with 95 % intervals (None of
    a single question, and for a τ where no answer got past its first token)."""

    questions: int
    tau: float | None
    tau_ci95: tuple[float, ...] | None
    speedup: float
    speedup_ci95: tuple[float, ...] | None


@dataclass(frozen=True, kw_only=True)
class DecodingRecord(JsonRecord):
    """A benchmark of a head; `shape` describes the draft in words."""

    shape: str
    dtype: str
    device: str
    temperature: float
    max_new_tokens: int
    template_arguments: dict[str, Any] | None = None
    timestamp: str | None = None
    tasks: dict[str, TaskRecord]

    def measures_as(self, other: DecodingRecord) -> bool:
        """Whether the other was made of the same draft under the same conditions, so that only one of them counts."""
        told = ("shape", "dtype", "device", "temperature", "max_new_tokens", "template_arguments")
        return all(getattr(self, part) == getattr(other, part) for part in told)


@dataclass(frozen=True, kw_only=True)
class MeasuredRecord(JsonRecord):
    """All that was measured on a head."""

    held_out: HeldOut | None = None
    decoding: tuple[DecodingRecord, ...] = ()
