"""What can be verified on a model: whole trees in one forward, only chains, or nothing; found by trying.

A leak is asked for directly: a token is exchanged in a block of the same shape, and whatever may not see it must stay
as it was, to the bit, while whatever sees it must not. Comparing with the same tokens in another shape would need to
know how much rounding that brings, which depends on the model, the type and where its attention is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tercel.errors import TercelError
from tercel.target_model.experts import has_experts
from tercel.target_model.output_layer import probe_tokens
from tercel.target_model.prefill import prefill

if TYPE_CHECKING:
    from tercel.target_model.model import Target

_RECURRENT = ("linear_attention", "conv", "mamba", "recurrent", "hybrid", "hybrid_sliding")
_MASKED = ("full_attention", "sliding_attention", "global")  # whose masks `Target` knows how to make
NOISE = 0.4  # of the logits' deviation: what another shape may change at most (bfloat16: 0.1 on the default target)
EXACT = 0.02  # the same in float32
LEAK = 0.25  # of what a visible token changes: what rounding stays below where bits cannot be compared
_FAILURES = (RuntimeError, TypeError, ValueError, LookupError, AttributeError)


@dataclass(frozen=True)
class TreeSupport:
    """Whether drafts can be verified in one forward: as a tree, as a chain; and if not, why."""

    tree: bool
    chain: bool
    reason: str = ""

    def require_tree(self, name: str) -> None:
        """Raises `TercelError` naming the reason if trees cannot be verified on this model."""
        if not self.tree:
            advice = "use --tree chain:4" if self.chain else "it can only be decoded token by token"
            raise TercelError(f"{name} cannot verify a draft tree: {self.reason}; {advice}")

    def require_chain(self, name: str) -> None:
        """Raises `TercelError` naming the reason if not even a chain can be verified on this model."""
        if not self.chain:
            raise TercelError(f"{name} cannot verify drafts: {self.reason}")


def probe_tree_support(target: Target) -> TreeSupport:
    """Run a small tree, and where that fails a small chain, with one token or position after another exchanged."""
    kinds = (*(getattr(target.config, "layer_types", None) or ()), *(getattr(target.config, "attention_layers", ())))
    refusal = _refused_layers(kinds)
    if refusal is not None:
        return TreeSupport(False, False, refusal)
    # the first two are siblings, the third is the second's child: the first must be invisible to both
    tree = torch.tensor([[1, 0, 0], [0, 1, 0], [0, 1, 1]], dtype=torch.bool, device=target.device)
    try:
        fault = _ignores_positions(target, tree, [0, 0, 1]) or _fault(target, tree, [0, 0, 1])
        if fault is None:
            return TreeSupport(True, True)
        broken = _fault(target, torch.ones_like(tree).tril(), [0, 1, 2])
    except _FAILURES as error:
        return TreeSupport(False, False, f"its attention does not take a mask and a cache from outside ({error})")
    return TreeSupport(False, True, fault) if broken is None else TreeSupport(False, False, broken)


def check_steps(target: Target) -> None:
    """Raises `TercelError` if not even decoding token by token gives what one forward over the text does."""
    name, tokens = target.source.name, probe_tokens(target.model)[0].tolist()
    try:
        cache = target.new_cache(1, len(tokens))
        for piece in (tokens[:3], *([token] for token in tokens[3:])):
            (output,) = prefill(target, [piece], cache)
        whole = target.encode(torch.tensor([tokens], device=target.device)).hidden
    except _FAILURES as error:
        raise TercelError(
            f"{name} cannot be decoded: it takes no cache of transformers' usual kind ({error}); "
            "a target of another architecture is needed"
        ) from error
    if not _near(target, output.hidden[0, -1], whole[0, -1]):
        raise TercelError(
            f"{name} cannot be decoded: tokens one by one give other logits than the whole text at once; "
            "a target of another architecture is needed"
        )


def _refused_layers(kinds: Sequence[str]) -> str | None:
    """Why layers of these kinds cannot be rolled back or masked, or None."""
    for kind in kinds:
        if kind in _RECURRENT:
            return f"its {kind} layers keep a state that cannot be rolled back to an earlier token"
        if kind not in _MASKED:
            return f"its {kind} layers want a mask of their own kind, which is not supported yet"
    return None


class _Block:
    """Forwards of one shape: three tokens under a mask `[T, T]` after three tokens of a cache."""

    def __init__(self, target: Target, block_mask: Tensor, depths: list[int], first: int | None = None) -> None:
        self.target, self.block_mask, self.depths = target, block_mask, depths
        tokens = probe_tokens(target.model)[0].tolist()
        self.prefix, self.tokens = tokens[:3], tokens[3:]
        self.cache = target.new_cache(1, len(tokens))
        prefill(target, [[self.prefix[0] if first is None else first, *self.prefix[1:]]], self.cache)
        self.before = self.hidden()

    def hidden(self, tokens: list[int] | None = None, depths: list[int] | None = None) -> Tensor:
        """`[T, K]`; nothing of it stays in the cache."""
        device = self.target.device
        positions = torch.tensor([depths or self.depths], device=device) + len(self.prefix)
        block = torch.tensor([tokens or self.tokens], device=device)
        return self.target.forward(block, positions, self.cache, self.block_mask[None]).hidden[0]

    def exchanged(self, node: int) -> Tensor:
        """`[T]`: how far another token at `node` moves each one."""
        tokens = list(self.tokens)
        tokens[node] = self.prefix[0]
        return _moved(self.hidden(tokens), self.before)

    def exact(self) -> bool:
        """Whether bits can be compared: experts get other numbers of tokens when one changes, so that rounding moves
        the bits of others."""
        return not has_experts(self.target.config) and torch.equal(self.before, self.hidden())


def _fault(target: Target, block_mask: Tensor, depths: list[int]) -> str | None:
    """Why a block under `block_mask` is not what its paths are one by one, or None."""
    block = _Block(target, block_mask, depths)
    other = _Block(target, block_mask, depths, first=block.tokens[0])
    if _moved(other.before, block.before).min() == 0:
        return "a block does not see the tokens in the cache"
    moved = torch.stack([block.exchanged(node) for node in range(len(depths))], 1)  # [T, T], like the mask
    if moved[block_mask].min() == 0:
        return "the tokens of a block do not see those that the mask shows them"
    if moved[~block_mask].max() > (0.0 if block.exact() else LEAK * float(moved[block_mask].min())):
        return "its attention ignores the tree mask, so siblings see each other"
    path = [token for token, seen in zip(block.tokens, block_mask[-1].tolist(), strict=True) if seen]
    whole = target.encode(torch.tensor([[*block.prefix, *path]], device=target.device)).hidden
    if not _near(target, block.before[-1], whole[0, -1]):
        return "a block after the cached tokens gives other logits than the whole text at once"
    return None


def _ignores_positions(target: Target, block_mask: Tensor, depths: list[int]) -> str | None:
    block = _Block(target, block_mask, depths)
    deeper = block.hidden(depths=[*depths[:-1], depths[-1] + 1])
    if _moved(deeper, block.before)[-1] == 0:
        return "its attention ignores the given positions, so a node counts its siblings as tokens before it"
    return None


def _moved(after: Tensor, before: Tensor) -> Tensor:
    """`[T]`: how far each token's hidden state moved; 0 only if no bit did."""
    return (after.float() - before.float()).abs().amax(-1)


def _near(target: Target, hidden: Tensor, truth: Tensor) -> bool:
    """Whether two hidden states `[K]` give the same logits but for what another shape may change."""
    ours, theirs = target.logits(hidden).float(), target.logits(truth).float()
    allowed = EXACT if target.dtype == torch.float32 and not target.rounds_activations else NOISE
    return float((ours - theirs).abs().mean()) <= allowed * float(theirs.std())
