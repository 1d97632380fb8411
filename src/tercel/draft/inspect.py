"""What there is to know of a head without running it: shapes, cost, origin, and what may be wrong with it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from tercel.draft.checkpoint import DraftModel, load_head
from tercel.draft.config import HeadConfig
from tercel.errors import TercelError

MAPS = ("d2t", "t2d")
BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8, "I64": 8, "I32": 4, "BOOL": 1, "U8": 1}


@dataclass(frozen=True)
class TensorFact:
    """One tensor of the file; `dtype` in safetensors' names."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def count(self) -> int:
        total = 1
        for size in self.shape:
            total *= size
        return total

    @property
    def bytes(self) -> int:
        return self.count * BYTES[self.dtype]


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
    """All of `tercel inspect`. `coverage`: share of the training text's tokens in the draft vocabulary."""

    path: Path
    config: HeadConfig
    tensors: tuple[TensorFact, ...]
    parameters: int
    cost: HeadCost
    coverage: float | None
    target: dict[str, str] | None
    training: dict[str, Any]
    measured: dict[str, Any]
    warnings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "head": self.config.to_dict(),
            "layer_ids_mean": "input of decoder layer i",
            "tensors": [{**asdict(t), "shape": list(t.shape), "bytes": t.bytes} for t in self.tensors],
            "parameters": self.parameters,
            "cost": {**asdict(self.cost), "drafted_flops": self.cost.drafted_flops},
            "draft_vocabulary_coverage": self.coverage,
            "target": self.target,
            "training": self.training,
            "measured": self.measured,
            "warnings": list(self.warnings),
        }


def inspect_head(path: Path) -> HeadReport:
    """Read and check the checkpoint at `path`. Raises `TercelError` as `load_head` does."""
    model = load_head(path)
    tensors = _tensor_facts(path / "model.safetensors")
    identity = model.info.target
    coverage = model.info.training.get("draft_vocabulary_coverage")
    return HeadReport(
        path=path,
        config=model.head.config,
        tensors=tensors,
        parameters=model.head.num_parameters(),
        cost=head_cost(model.head.config, tensors),
        coverage=coverage,
        target=asdict(identity) if identity is not None else None,
        training=model.info.training,
        measured=model.info.measured,
        warnings=(*model.warnings, *_warnings(model)),
    )


def head_cost(c: HeadConfig, tensors: tuple[TensorFact, ...]) -> HeadCost:
    """Cost of the head of spec section 2: q, k and v take `2H`, the output layer has `W` rows."""
    query, key = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    attention = 2 * c.hidden_size * (query + 2 * key) + query * c.hidden_size
    mlp = 3 * c.hidden_size * c.intermediate_size
    weights = [t for t in tensors if t.name not in MAPS]
    width = max((BYTES[t.dtype] for t in weights), default=2)
    return HeadCost(
        drafted_macs=attention + mlp + c.hidden_size * c.draft_vocab_size,
        context_macs=2 * query,
        fuse_macs=c.num_features * c.target_hidden_size * c.hidden_size,
        kv_bytes=2 * key * width,
        weight_bytes=sum(t.bytes for t in tensors),
    )


def _tensor_facts(file: Path) -> tuple[TensorFact, ...]:
    facts = []
    with safe_open(file, framework="pt") as stored:
        for name in stored.keys():  # noqa: SIM118 (not a dict)
            piece = stored.get_slice(name)
            if piece.get_dtype() not in BYTES:
                raise TercelError(f"{name} in {file} has type {piece.get_dtype()}; save the head as bfloat16")
            facts.append(TensorFact(name, tuple(piece.get_shape()), piece.get_dtype()))
    return tuple(sorted(facts, key=lambda fact: fact.name))


def _warnings(model: DraftModel) -> tuple[str, ...]:
    config, info = model.head.config, model.info
    warnings = []
    recipe = info.training.get("recipe", {})
    trained = recipe.get("max_length")
    if trained is not None and trained < config.max_position_embeddings:
        warnings.append(
            f"trained on at most {trained} tokens; beyond them, up to the {config.max_position_embeddings} "
            "positions declared, acceptance may fall"
        )
    if info.target is None:
        warnings.append("the target it was trained for is not recorded, so a wrong one cannot be noticed")
    if not info.measured:
        warnings.append("nothing was measured on it")
    if tuple(sorted(config.feature_layers)) != config.feature_layers:
        warnings.append(f"feature layers {config.feature_layers} do not ascend; engines may sort them")
    return tuple(warnings)
