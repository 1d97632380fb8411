"""An EAGLE-3 chain computed from a view: plain functions on named tensors, in float32."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tercel.errors import TercelError
from tercel.interop.loaders.parts import EngineView, layer_role


def look_up(view: EngineView, tokens: Tensor, of_target: Tensor) -> Tensor:
    """Embeddings `[T, H]` of the tokens `[T]` from the table the engine would use; `of_target` `[T, Ht]` are those of
    the same tokens in the target's."""
    return view.weights["embed_tokens.weight"][tokens].float() if view.embeddings == "own" else of_target


def draft_logits(
    view: EngineView, features: Tensor, embeddings: Tensor, positions: Tensor, steps: int
) -> list[Tensor]:
    """The chain's logits `[T-s, W]` for steps `s = 0 … steps-1`.

    features `[T, n*Ht]` of the target, low to high; embeddings `[T, H]`, row `t` of the token *after* feature `t`;
    positions int64 `[T]`. Step `s` starts from its own output of step `s-1`, reads embedding `t + s` at position
    `t + s`, and sees the causal past of step 0 and its own earlier steps (paper section 3.2), as decoding does when
    all drafts are accepted.

    Raises `TercelError` if the engine would leave a tensor uninitialised: then there is nothing to compute.
    """
    if view.random:
        raise TercelError(f"{view.engine} would leave {view.random[0]} uninitialised; its logits mean nothing")
    past = [_Past() for _ in range(view.sizes.layers)]
    hidden, logits = _fuse(view, features.float()), []
    for step in range(steps):
        rows = len(positions) - step
        at = positions[:rows] + step
        output = _first_layer(view, embeddings[step:].float(), hidden[:rows], at, past[0])
        for number in range(1, view.sizes.layers):
            output = _further_layer(view, number, output, at, past[number])
        normed = _norm(view, output, "norm.weight")
        logits.append(F.linear(normed, _weight(view, "lm_head.weight")))
        hidden = normed if view.flags["norm_output"] else output
    return logits


class _Past:
    """Keys and values of a layer in the steps so far, each `[T-s, kv, D]`."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []


def _weight(view: EngineView, role: str) -> Tensor:
    return view.weights[role].float()


def _norm(view: EngineView, x: Tensor, role: str) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + view.sizes.eps) * _weight(view, role)


def _fuse(view: EngineView, features: Tensor) -> Tensor:
    if view.flags["norm_before_fc"]:
        features = _norm(view, features, "input_norm.weight")
    if view.flags["fc_norm"]:
        parts = features.chunk(len(view.layers), dim=-1)
        features = torch.cat([_norm(view, part, f"fc_norm.{i}.weight") for i, part in enumerate(parts)], dim=-1)
    return F.linear(features, _weight(view, "fc.weight"))


def _first_layer(view: EngineView, embedded: Tensor, hidden: Tensor, positions: Tensor, past: _Past) -> Tensor:
    normed = _norm(view, hidden, "midlayer.hidden_norm.weight")
    both = torch.cat([_norm(view, embedded, "midlayer.input_layernorm.weight"), normed], dim=-1)
    residual = normed if view.flags["norm_before_residual"] else hidden
    return _layer(view, "midlayer", both, residual, positions, past)


def _further_layer(view: EngineView, number: int, hidden: Tensor, positions: Tensor, past: _Past) -> Tensor:
    role = layer_role(number)
    return _layer(view, role, _norm(view, hidden, f"{role}.input_layernorm.weight"), hidden, positions, past)


def _layer(view: EngineView, role: str, x: Tensor, residual: Tensor, positions: Tensor, past: _Past) -> Tensor:
    """x: what q, k and v take; residual `[T, H]`."""
    middle = residual + _project(view, role, _attend(view, role, x, positions, past), "o")
    inner = _norm(view, middle, f"{role}.post_attention_layernorm.weight")
    gate, up, down = (_weight(view, f"{role}.mlp.{name}_proj.weight") for name in ("gate", "up", "down"))
    return middle + F.linear(F.silu(F.linear(inner, gate)) * F.linear(inner, up), down)


def _project(view: EngineView, role: str, x: Tensor, name: str) -> Tensor:
    bias = view.weights.get(f"{role}.self_attn.{name}_proj.bias")
    weight = _weight(view, f"{role}.self_attn.{name}_proj.weight")
    return F.linear(x, weight, None if bias is None else bias.float())


def _attend(view: EngineView, role: str, x: Tensor, positions: Tensor, past: _Past) -> Tensor:
    """Row `t` sees rows `0..t` of step 0 and its own entries of later steps."""
    rows, heads, kv, size = len(x), view.sizes.heads, view.sizes.kv_heads, view.sizes.head_dim
    query = _rotate(view, _project(view, role, x, "q").view(rows, heads, size), positions)
    past.keys.append(_rotate(view, _project(view, role, x, "k").view(rows, kv, size), positions))
    past.values.append(_project(view, role, x, "v").view(rows, kv, size))
    keys = [k[:rows].repeat_interleave(heads // kv, dim=1) for k in past.keys]
    values = [v[:rows].repeat_interleave(heads // kv, dim=1) for v in past.values]
    scale = 1 / math.sqrt(size)
    first = torch.einsum("thd,shd->hts", query, keys[0]) * scale
    first = first.masked_fill(torch.ones(rows, rows).triu(1).bool(), float("-inf"))
    later = [(query * k).sum(-1).T[..., None] * scale for k in keys[1:]]
    share = torch.softmax(torch.cat([first, *later], dim=-1), dim=-1)
    out = torch.einsum("hts,shd->thd", share[..., :rows], values[0])
    for step, v in enumerate(values[1:]):
        out = out + share[..., rows + step].T[..., None] * v
    return out.flatten(1)


def _rotate(view: EngineView, x: Tensor, positions: Tensor) -> Tensor:
    """`x` `[T, heads, D]`; the first half of a head turns with the second."""
    frequencies, scale = frequencies_of(view.rope, view.sizes.head_dim)
    angle = positions.float()[:, None, None] * frequencies
    cos, sin = torch.cos(angle) * scale, torch.sin(angle) * scale
    half = view.sizes.head_dim // 2
    low, high = x[..., :half], x[..., half:]
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


def frequencies_of(rope: dict[str, Any], size: int) -> tuple[Tensor, float]:
    """Radians a position `[D/2]`, and what cosine and sine are scaled by.

    Raises `TercelError` for a scaling that is not known here.
    """
    kind, theta = rope.get("rope_type", "default"), float(rope["rope_theta"])
    plain = 1.0 / theta ** (torch.arange(0, size, 2).float() / size)
    if "freq_factors" in rope:
        plain = plain / rope["freq_factors"]
    if kind in ("default", "dynamic"):  # dynamic scaling begins beyond the positions a head was trained on
        return plain, 1.0
    if kind == "linear":
        return plain / float(rope["factor"]), 1.0
    if kind == "llama3":
        return _llama3(plain, rope), 1.0
    if kind == "yarn":
        return _yarn(plain, rope, size, theta)
    raise TercelError(f"RoPE scaling {kind!r} cannot be checked; only default, linear, dynamic, llama3 and yarn can")


def _llama3(plain: Tensor, rope: dict[str, Any]) -> Tensor:
    """Long waves slower by `factor`, short ones as they are, a ramp between."""
    context, factor = float(rope["original_max_position_embeddings"]), float(rope["factor"])
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    ramp = ((context * plain / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
    return plain * (ramp + (1 - ramp) / factor)


def _yarn(plain: Tensor, rope: dict[str, Any], size: int, theta: float) -> tuple[Tensor, float]:
    factor, context = float(rope["factor"]), float(rope["original_max_position_embeddings"])

    def dimension(turns: float) -> float:
        return size * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(float(rope.get("beta_fast") or 32)), dimension(float(rope.get("beta_slow") or 1))
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    ramp = ((torch.arange(size // 2).float() - low) / max(high - low, 0.001)).clamp(0, 1)

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

    scale = rope.get("attention_factor")
    if scale is None:
        both = rope.get("mscale") and rope.get("mscale_all_dim")
        scale = magnitude(rope["mscale"]) / magnitude(rope["mscale_all_dim"]) if both else magnitude(1)
    return plain * (1 - ramp) + plain / factor * ramp, float(scale)
