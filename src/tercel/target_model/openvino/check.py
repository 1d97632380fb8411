"""Whether another way of computing a target gives what the reference gives, found by trying both.

Shape legend: B rows, T block length, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from tercel.errors import TercelError
from tercel.target_model.capabilities import probe_tree_support
from tercel.target_model.int8 import Int8Weights
from tercel.target_model.openvino.cache import SlotCache
from tercel.target_model.openvino.places import SECOND_CHUNK, positions_of
from tercel.target_model.prefill import prefill

if TYPE_CHECKING:
    from tercel.target_model.model import Target

EXACT = 1e-4  # float32: of the deviation of the numbers compared, what their differences may come to on average
NOISY = 2.0  # bfloat16: how many times what the reference moves by if every layer's input is off in its last bit
FLIPPED = 2.0**-16  # what is put off instead in float32 where activations are rounded: last bits decide to which number
_LENGTHS, _CHUNK = (23, 9), 7  # of two prompts, run in pieces
_PARENTS = (-1, 0, 0, 1, 1, 2, 4, 6, 0)  # of a tree after each
_FAR = SECOND_CHUNK + 19  # tokens before a tree behind slots that are left free


def check_against(reference: Target, other: Target, layers: Sequence[int]) -> None:
    """Raises `TercelError` if `other` differs from the reference, also in what enters `layers`, or shows a block's
    tokens what they must not see."""
    support = probe_tree_support(other)
    if not support.tree:
        raise TercelError(support.reason)
    if other.context_length >= _FAR + len(_PARENTS) and _sees_empty_slots(other):
        raise TercelError("it shows a block's tokens slots of the cache that hold no token")
    with other.activations():
        truth = _probe(reference, layers)
        allowed = [EXACT] * len(truth)
        if reference.dtype != torch.float32 or other.rounds_activations:
            unit = max(_unit(reference.dtype), FLIPPED)
            with _last_bits_off(reference, unit):
                rounded = _probe(reference, layers)
            allowed = [NOISY * max(_distance(*pair), unit) for pair in zip(rounded, truth, strict=True)]
    names = ("hidden states", *(f"inputs of layer {layer}" for layer in layers), "logits")
    for name, ours, theirs, most in zip(names, _probe(other, layers), truth, allowed, strict=True):
        found = _distance(ours, theirs)
        if not found <= most:  # nor if it is NaN
            raise TercelError(
                f"its {name} differ from the reference's by {found:.2g} of their deviation, where {most:.2g} is allowed"
            )


def rounds_activations(reference: Target, other: Target, int8: Int8Weights) -> bool:
    """Whether `other` rounds what goes into products with int8 weights, which is its library's choice on this CPU: to
    which of the two its logits are nearer."""
    plain, ours = (_probe(target, ())[-1] for target in (reference, other))
    with int8.activations_rounded():
        rounded = _probe(reference, ())[-1]
    return _distance(ours, rounded) < _distance(ours, plain)


def _probe(target: Target, layers: Sequence[int]) -> list[Tensor]:
    """Two prompts of unlike lengths in pieces, then a tree after each: hidden states, captured layers, logits."""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(target.vocab_size, (length,), generator=generator).tolist() for length in _LENGTHS]
    cache, seen = target.new_cache(len(prompts), max(_LENGTHS) + len(_PARENTS)), _tree()
    prefill(target, prompts, cache, chunk=_CHUNK)
    tokens = torch.randint(target.vocab_size, (len(prompts), len(_PARENTS)), generator=generator)
    positions = torch.tensor(_LENGTHS)[:, None] + seen.sum(-1) - 1
    out = target.forward(tokens, positions, cache, seen.expand(len(prompts), -1, -1), layers)
    return [out.hidden, *out.layers, target.logits(out.hidden)]


def _sees_empty_slots(target: Target) -> bool:
    """Whether what lies in slots without a token changes a bit, behind a context that fills more than one chunk; what
    its tokens are does not matter."""
    cache, seen = target.new_cache(1, 0), _tree()
    cache.lengths[0] = _FAR
    cache.add_rows(0)
    tokens, positions = torch.arange(len(_PARENTS))[None] % target.vocab_size, (_FAR + seen.sum(-1) - 1)[None]
    found = []
    for held in (0.0, 3.0):
        for part in cast(SlotCache, cache).past([0]):
            part[:, :, positions_of(part.shape[2]) >= _FAR] = held
        found.append(target.forward(tokens, positions, cache, seen[None]).hidden)
    return not torch.equal(*found)


def _tree() -> Tensor:
    """bool `[T, T]`: what each of its nodes sees of it."""
    seen = torch.eye(len(_PARENTS), dtype=torch.bool)
    for node, parent in enumerate(_PARENTS[1:], 1):
        seen[node] |= seen[parent]
    return seen


@contextmanager
def _last_bits_off(target: Target, unit: float) -> Iterator[None]:
    """Within, every layer gets an input each number of which is off by `unit` of it, such as one rounding."""
    generator = torch.Generator().manual_seed(0)

    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        states = args[0] if args else kwargs["hidden_states"]
        signs = torch.randint(2, states.shape, generator=generator) * 2 - 1
        moved = (states.float() * (1 + signs * unit)).to(states.dtype)
        return ((moved, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": moved})

    hooks = [layer.register_forward_pre_hook(hook, with_kwargs=True) for layer in target.stock.layers]
    try:
        yield
    finally:
        for handle in hooks:
            handle.remove()


def _unit(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def _distance(ours: Tensor, theirs: Tensor) -> float:
    """How far they are apart on average, in standard deviations."""
    return float((ours.float() - theirs.float()).abs().mean() / theirs.float().std())
