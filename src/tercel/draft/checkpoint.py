"""A head on disk: the public SafeAILab/SGLang format, plus `tercel.json` for what that format cannot hold.

config.json        of EAGLE-3: plain Llama keys, `LlamaForCausalLMEagle3`
model.safetensors  the head's tensors, `d2t` (offsets) and `t2d`
tercel.json        kind, feature layers and their convention, the target it belongs to, how it was trained
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save_file

from tercel.draft.eagle3 import Eagle3Head
from tercel.draft.head import DraftHead
from tercel.draft.history import MeasuredRecord, TrainingRecord
from tercel.draft.vocabulary import DraftVocabulary
from tercel.errors import TercelError
from tercel.file_set import CARD, CONFIG, RECORD, WEIGHTS, file_set, may_replace_card
from tercel.files import as_json, put_text

FORMAT = 1
Kind = TypeVar("Kind", bound=DraftHead)


@dataclass(frozen=True)
class TargetIdentity:
    """Which target a head was trained for: its name, a digest of its weights and one of its tokenizer."""

    name: str
    weights: str
    tokenizer: str


@dataclass(frozen=True)
class HeadInfo:
    """What `tercel.json` holds beside the sizes."""

    target: TargetIdentity | None
    training: TrainingRecord = field(default_factory=TrainingRecord)
    measured: MeasuredRecord = field(default_factory=MeasuredRecord)

    @property
    def target_name(self) -> str | None:
        """The target that is recorded, be it by another maker; None if none is."""
        return self.target.name if self.target is not None else self.training.target_name


@dataclass(frozen=True)
class Convention:
    """Something that formats disagree on: what holds for this head, and where that was read."""

    name: str
    value: str
    source: str


@dataclass(frozen=True)
class DraftModel:
    """A head with its vocabulary and its history: what everything that takes a HEAD works with.

    format: who wrote the files; conventions: how they were read (empty for a head of this package).
    """

    head: DraftHead
    vocabulary: DraftVocabulary
    info: HeadInfo
    path: Path | None = None
    warnings: tuple[str, ...] = ()
    format: str = "tercel"
    conventions: tuple[Convention, ...] = ()

    def head_as(self, kind: type[Kind]) -> Kind:
        """The head, where only one of `kind` will do; raises `TercelError` for another."""
        if not isinstance(self.head, kind):
            raise TercelError(
                f"{self.path or 'this'} is a head of {self.head.title}, and this takes one of {kind.title} only"
            )
        return self.head

    @property
    def eagle3(self) -> Eagle3Head:
        """As `head_as`, for what knows EAGLE-3 alone: engines and their formats, and training."""
        return self.head_as(Eagle3Head)


def save_head(
    model: DraftModel, out: Path, *, dtype: torch.dtype = torch.bfloat16, card: str | None = None
) -> None:
    """Write the checkpoint into the folder `out`, all of it or nothing; other files there stay.

    `card` becomes its README.md, unless there is one that somebody else wrote or edited.
    Raises `TercelError` if a file of another maker is in the way, the folder cannot be written, or the head is of a
    kind that is not written.
    """
    config = model.head.public_config(dtype)
    tensors = {name: p.detach().to("cpu", dtype).contiguous() for name, p in model.head.named_parameters()}
    tensors["d2t"] = model.vocabulary.d2t
    tensors["t2d"] = model.vocabulary.t2d
    with file_set(out, "head") as staging:
        save_file(tensors, staging / WEIGHTS, metadata={"format": "pt"})
        put_text(staging / CONFIG, as_json(config))
        put_text(staging / RECORD, as_json(description(model)))
        if card is not None and may_replace_card(out):
            put_text(staging / CARD, card)


def description(model: DraftModel) -> dict[str, Any]:
    """What `tercel.json` holds: sizes, target, history and results, from which the folder is read back exactly."""
    return {
        "format": FORMAT,
        "layer_ids_mean": "input of decoder layer i",
        "head": model.head.config.to_dict(),
        "target": asdict(model.info.target) if model.info.target else None,
        "training": model.info.training.to_json(),
        "measured": model.info.measured.to_json(),
    }
