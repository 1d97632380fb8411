"""What there is to know of a head without running it: shapes, cost, origin, and what may be wrong with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from tercel.draft.checkpoint import Convention, DraftModel
from tercel.draft.config import HeadConfig
from tercel.draft.head import DraftHead
from tercel.draft.history import MeasuredRecord, TrainingRecord
from tercel.draft.vocabulary import MAPS


@dataclass(frozen=True)
class TensorFact:
    """One tensor of the file, by its name there; `item` bytes a number."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    item: int

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> TensorFact:
        return cls(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.element_size())

    @property
    def bytes(self) -> int:
        total = self.item
        for size in self.shape:
            total *= size
        return total


@dataclass(frozen=True)
class HeadCost:
    """Multiply-accumulates (MACs; a MAC is 2 FLOPs) and bytes.

    drafted_macs: one head forward for one drafted token, attention's own products left out; context_macs:
    those, for every token of the context. fuse_macs: `fc`, once for each token that the target commits.
    kv_bytes: keys and values of a token at the file's precision. weight_bytes: the file's tensors.
    """

    drafted_macs: int
    context_macs: int
    fuse_macs: int
    kv_bytes: int
    weight_bytes: int

    @property
    def drafted_flops(self) -> int:
        return 2 * self.drafted_macs


@dataclass(frozen=True)
class HeadReport:
    """All of `tercel inspect`. `coverage`: share of the training text's tokens in the draft vocabulary. `format`: who
    wrote the files; `conventions`: what they mean, where formats disagree; `kind` and `reads`, its kind and what it
    reads of the target, in words."""

    path: Path | None
    format: str
    kind: str
    reads: str
    config: HeadConfig
    tensors: tuple[TensorFact, ...]
    parameters: int
    cost: HeadCost
    coverage: float | None
    target: dict[str, str] | None
    training: TrainingRecord
    measured: MeasuredRecord
    conventions: tuple[Convention, ...]
    warnings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "format": self.format,
            "head": self.config.to_dict(),
            "layer_ids_mean": "input of decoder layer i",
            "tensors": [{**asdict(t), "shape": list(t.shape), "bytes": t.bytes} for t in self.tensors],
            "parameters": self.parameters,
            "cost": {**asdict(self.cost), "drafted_flops": self.cost.drafted_flops},
            "draft_vocabulary_coverage": self.coverage,
            "target": self.target,
            "training": self.training.to_json(),
            "measured": self.measured.to_json(),
            "conventions": [asdict(convention) for convention in self.conventions],
            "warnings": list(self.warnings),
        }


def inspect_head(model: DraftModel, stored: Mapping[str, Tensor]) -> HeadReport:
    """What there is to say of `model`, whose files hold the tensors `stored`."""
    tensors = tuple(TensorFact.of(name, stored[name]) for name in sorted(stored))
    identity = model.info.target
    return HeadReport(
        path=model.path,
        format=model.format,
        kind=model.head.in_words(),
        reads=model.head.reads_in_words(),
        config=model.head.config,
        tensors=tensors,
        parameters=model.head.num_parameters(),
        cost=head_cost(model.head, tensors),
        coverage=model.info.training.draft_vocabulary_coverage,
        target=asdict(identity) if identity is not None else None,
        training=model.info.training,
        measured=model.info.measured,
        conventions=model.conventions,
        warnings=(*model.warnings, *_warnings(model)),
    )


def head_cost(head: DraftHead, tensors: tuple[TensorFact, ...]) -> HeadCost:
    """What drafting with `head` takes, at the precision of its files' `tensors`."""
    work = head.work()
    return HeadCost(
        drafted_macs=work.drafted,
        context_macs=work.context,
        fuse_macs=work.fuse,
        kv_bytes=work.kv * max((t.item for t in tensors if t.name not in MAPS), default=2),
        weight_bytes=sum(t.bytes for t in tensors),
    )


def _warnings(model: DraftModel) -> tuple[str, ...]:
    config, info = model.head.config, model.info
    warnings = []
    recipe = info.training.recipe
    if recipe is not None and recipe.max_length < config.max_position_embeddings:
        warnings.append(
            f"trained on at most {recipe.max_length} tokens; beyond them, up to the {config.max_position_embeddings} "
            "positions declared, acceptance may fall"
        )
    if info.target is None:
        warnings.append("the target it was trained for is not recorded, so a wrong one cannot be noticed")
    if info.measured.held_out is None and not info.measured.decoding:
        warnings.append("nothing was measured on it")
    if tuple(sorted(config.feature_layers)) != config.feature_layers:
        warnings.append(f"feature layers {config.feature_layers} do not ascend; engines may sort them")
    return tuple(warnings)
