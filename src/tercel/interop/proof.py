"""Whether an exported folder holds the head: read by the engine's view, compared with the source, chained."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from tercel.draft import DraftModel, Eagle3Head
from tercel.draft.alignment import rope_position, token_in
from tercel.draft.layers import Projected
from tercel.errors import TercelError
from tercel.interop.engines import find
from tercel.interop.loaders import EngineView, draft_logits, frequencies_of, look_up

ROWS, STEPS = 12, 4
ROUNDING = 1e-4  # largest difference of logits allowed, as a share of the largest logit: float32 in another order


@dataclass(frozen=True)
class Proven:
    """Something that was compared and is right."""

    name: str
    detail: str


def prove(model: DraftModel, engine: str, folder: Path, target_type: str | None = None) -> tuple[Proven, ...]:
    """Compare `folder`, as `engine` would load it, with the placed head it was written from.

    Raises `TercelError` for the first difference: a tensor missing, changed, random or in the way; layers, flags,
    vocabulary, RoPE or embeddings read otherwise; other draft logits.
    """
    depth = model.head.config.target_num_layers
    assert depth is not None
    seen = find(engine).view(folder, depth, target_type)
    checks = compare(model, seen)
    worst = _largest_difference(model, seen)
    if not worst <= ROUNDING:
        raise TercelError(
            f"{engine} would compute other draft logits from {folder.name} (off by {worst:.1e} of the largest)"
        )
    chain = f"{STEPS} steps over {ROWS} rows, {worst:.0e} of the largest logit at most"
    return (*checks, Proven("draft logits equal", chain))


def compare(model: DraftModel, seen: EngineView) -> tuple[Proven, ...]:
    """All that can be compared without computing. Raises `TercelError` for the first difference."""
    _same_tensors(model, seen)
    _same_vocabulary(model, seen)
    _same_conventions(model, seen)
    _same_rope(model, seen)
    c = model.head.config
    ids, positions = ", ".join(map(str, c.feature_layers)), c.max_position_embeddings
    on = [name for name, value in seen.flags.items() if value]
    skipped = f"; left aside: {', '.join(seen.skipped)}" if seen.skipped else ""
    kept = f"{len(model.vocabulary):,} of {c.vocab_size:,}" if model.vocabulary.pruned else "all of the target's"
    return (
        Proven("every tensor there once", f"{len(seen.weights)} of {len(seen.weights)}, values equal{skipped}"),
        Proven("nothing left random", "every tensor the loader builds is in the file"),
        Proven("layers", f"captures the inputs of {ids}"),
        Proven("flags", ", ".join(on) if on else "none set"),
        Proven("vocabulary", f"{kept} tokens"),
        Proven("embeddings", "the head's own" if seen.embeddings == "own" else "the target's"),
        Proven("RoPE and positions", f"base {c.rope_parameters['rope_theta']:g}, {positions:,} positions"),
    )


def _same_tensors(model: DraftModel, seen: EngineView) -> None:
    if seen.random:
        raise TercelError(f"{seen.engine} would leave {', '.join(seen.random)} at random values")
    useless = [name for name in seen.skipped if name != "t2d"]
    if useless:
        raise TercelError(f"{seen.engine} would not use {', '.join(useless)}, which lies in the file")
    source = dict(model.head.named_parameters())
    for name in source.keys() ^ seen.weights.keys():
        where = "the head" if name in source else seen.engine
        raise TercelError(f"only {where} has {name}; the export is not this head's")
    for name, parameter in source.items():
        if not torch.equal(parameter.detach().float().cpu(), seen.weights[name].float()):
            raise TercelError(f"{name} has other values in the export than in the head")


def _same_vocabulary(model: DraftModel, seen: EngineView) -> None:
    mine = model.vocabulary
    if seen.d2t is None and mine.pruned:
        raise TercelError(f"{seen.engine} finds no d2t and would take draft ids for ids of the target")
    if seen.d2t is not None and not torch.equal(seen.d2t, mine.d2t):
        raise TercelError(f"{seen.engine} reads another draft vocabulary than the head's")


def _same_conventions(model: DraftModel, seen: EngineView) -> None:
    c = model.head.config
    if seen.layers != c.feature_layers:
        raise TercelError(
            f"{seen.engine} would capture the inputs of layers {', '.join(map(str, seen.layers))}, but the head was "
            f"trained on {', '.join(map(str, c.feature_layers))}"
        )
    meant = c.to_dict()
    for name, value in seen.flags.items():
        if value != meant[name]:
            raise TercelError(f"{seen.engine} would compute with {name} {value}, but the head has {meant[name]}")
    if (seen.embeddings == "own") != c.own_embeddings:
        raise TercelError(f"{seen.engine} would look tokens up in {seen.embeddings} embeddings, unlike the head")
    sizes = (c.num_attention_heads, c.num_key_value_heads, c.head_dim)
    if sizes != (seen.sizes.heads, seen.sizes.kv_heads, seen.sizes.head_dim):
        raise TercelError(f"{seen.engine} would split attention into other heads than {sizes}")


def _same_rope(model: DraftModel, seen: EngineView) -> None:
    c, rotary = model.eagle3.config, model.eagle3.rotary
    frequencies, scale = frequencies_of(seen.rope, seen.sizes.head_dim)
    same = torch.allclose(frequencies, rotary.inv_freq.float().cpu(), rtol=1e-5, atol=0)
    if not same or abs(scale - float(rotary.attention_scaling)) > 1e-5:
        raise TercelError(
            f"{seen.engine} would rotate with {seen.rope}, but the head was trained with {c.rope_parameters}"
        )
    if abs(seen.sizes.eps - c.rms_norm_eps) > 1e-5 * c.rms_norm_eps:
        raise TercelError(f"{seen.engine} would norm with epsilon {seen.sizes.eps:g}, not {c.rms_norm_eps:g}")
    if seen.sizes.positions != c.max_position_embeddings:
        raise TercelError(f"{seen.engine} reads {seen.sizes.positions} positions, not {c.max_position_embeddings}")


@torch.no_grad()
def _largest_difference(model: DraftModel, seen: EngineView) -> float:
    """Of the chain's logits on fixed random input, as a share of the largest."""
    head, c = model.eagle3, model.eagle3.config
    if head.dtype != torch.float32 or head.device.type != "cpu":
        head = copy.deepcopy(head).to("cpu", torch.float32)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(c.vocab_size, (ROWS,), generator=generator)
    features = torch.randn(ROWS, c.num_features * c.target_hidden_size, generator=generator)
    of_target = torch.randn(ROWS, c.target_hidden_size, generator=generator)
    positions = torch.arange(ROWS)
    embedded = head.embed_tokens(tokens) if c.own_embeddings else of_target
    mine = _chain(head, features, embedded, positions)
    theirs = draft_logits(seen, features, look_up(seen, tokens, of_target), positions, STEPS)
    largest = max(float(a.abs().max()) for a in mine)
    return max(float((a - b).abs().max()) for a, b in zip(mine, theirs, strict=True)) / max(largest, 1e-30)


def _chain(head: Eagle3Head, features: Tensor, embedded: Tensor, positions: Tensor) -> list[Tensor]:
    """The head's own: logits `[T-s, W]` of every step. `embedded` begins with the token that row 0 reads first."""
    hidden, logits = head.fuse(features), list[Tensor]()
    past = [(list[Tensor](), list[Tensor]()) for _ in (head, *head.deeper)]  # keys and values of each layer

    def attended(layer: int, now: Projected) -> tuple[Tensor, Tensor]:
        keys, values = past[layer]
        keys.append(now.key)
        values.append(now.value)
        return now.residual, _attend(now.query, keys, values)

    for step in range(STEPS):
        rows = torch.arange(len(positions) - step)
        hidden = hidden[rows]
        read = token_in(rows, step) - token_in(0, 0)
        at = rope_position(positions[rows], step)
        output = head.step(head.project(embedded[read], hidden, at), at, attended)
        logits.append(head.logits(output))
        hidden = head.feedback(output)
    return logits


def _attend(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """query `[T, q, D]`, keys and values of each step `[T.., kv, D]` → `[T, q*D]`."""
    rows, steps = len(query), len(keys)
    block = torch.ones(rows, rows, dtype=torch.bool).tril()
    own = torch.eye(rows, dtype=torch.bool)
    seen = torch.cat([block, *[own] * (steps - 1)], dim=1)
    key, value = (torch.cat([part[:rows] for part in parts]).transpose(0, 1) for parts in (keys, values))
    out = F.scaled_dot_product_attention(query.transpose(0, 1), key, value, attn_mask=seen, enable_gqa=True)
    return out.transpose(0, 1).flatten(1)
