"""What can be verified on a model: whole trees in one forward, only chains, or nothing; found by trying."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tercel.errors import TercelError
from tercel.target.output_layer import probe_tokens

if TYPE_CHECKING:
    from tercel.target.model import Target

_RECURRENT = ("linear_attention", "conv", "mamba", "recurrent", "hybrid", "hybrid_sliding")
_MASKED = ("full_attention", "sliding_attention")  # whose masks `Target` knows how to make
NOISE = 0.4  # of the logits' deviation: what another shape may change at most (bfloat16: 0.1 on the default target)


@dataclass(frozen=True)
class TreeSupport:
    """Whether drafts can be verified in one forward: as a tree, as a chain; and if not, why."""

    tree: bool
    chain: bool
    reason: str = ""

    def require_tree(self, name: str) -> None:
        """Raises `TercelError` naming the reason if trees cannot be verified on this model."""
        if not self.tree:
            advice = "use --draft chain" if self.chain else "it can only be decoded token by token"
            raise TercelError(f"{name} cannot verify a draft tree: {self.reason}; {advice}")

    def require_chain(self, name: str) -> None:
        """Raises `TercelError` naming the reason if not even a chain can be verified on this model."""
        if not self.chain:
            raise TercelError(f"{name} cannot verify drafts: {self.reason}")


def probe_tree_support(target: Target) -> TreeSupport:
    """Run a small tree and a small chain through the model and compare with the same tokens one by one."""
    refusal = _refused_layers(getattr(target.config, "layer_types", None) or ())
    if refusal is not None:
        return TreeSupport(False, False, refusal)
    tokens = probe_tokens(target.model)[0].tolist()
    prefix, left, right, leaf = tokens[:3], tokens[3], tokens[4], tokens[5]
    try:
        whole = target.encode(torch.tensor([[*prefix, right, leaf]], device=target.device)).hidden[0, -1]
        truth = target.logits(whole).float()
        one_by_one = _last_logits(target, [*prefix, right, leaf])
        chain = _block_logits(target, prefix, [right, leaf], None, [0, 1])
        # left and right are siblings, leaf is right's child: left must be invisible to both
        within = torch.tensor([[1, 0, 0], [0, 1, 0], [0, 1, 1]], dtype=torch.bool, device=target.device)
        tree = _block_logits(target, prefix, [left, right, leaf], within[None], [0, 0, 1])
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
        return TreeSupport(False, False, f"its attention does not take a mask and a cache from outside ({error})")
    # what rounding alone does to the same tokens in another shape; a leak through the mask does more
    noise, deviation = _distance(one_by_one, truth), float(truth.std())
    if noise > NOISE * deviation:
        return TreeSupport(False, False, "tokens one by one give other logits than the whole text at once")
    allowed = max(3 * noise, 0.02 * deviation)
    if _distance(chain, truth) > allowed:
        return TreeSupport(False, False, "a block behind the cache gives other logits than the tokens one by one")
    if _distance(tree, truth) > allowed:
        return TreeSupport(
            False,
            True,
            "its attention ignores the tree mask or the given positions, so siblings see each other",
        )
    return TreeSupport(True, True)


def _refused_layers(kinds: Sequence[str]) -> str | None:
    """Why layers of these kinds cannot be rolled back or masked, or None."""
    for kind in kinds:
        if kind in _RECURRENT:
            return f"its {kind} layers keep a state that cannot be rolled back to an earlier token"
        if kind not in _MASKED:
            return f"its {kind} layers want a mask of their own kind, which is not supported yet"
    return None


def _last_logits(target: Target, tokens: list[int]) -> Tensor:
    cache = target.new_cache(1, len(tokens))
    hidden = None
    for token in tokens:
        hidden = target.prefill([token], cache).hidden
    assert hidden is not None
    return target.logits(hidden[0, -1]).float()


def _block_logits(
    target: Target, prefix: list[int], block: list[int], within: Tensor | None, depths: list[int]
) -> Tensor:
    cache = target.new_cache(1, len(prefix) + len(block))
    target.prefill(prefix, cache)
    positions = torch.tensor([depths], device=target.device) + len(prefix)
    out = target.forward(torch.tensor([block], device=target.device), positions, cache, within)
    return target.logits(out.hidden[0, -1]).float()


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().mean())
