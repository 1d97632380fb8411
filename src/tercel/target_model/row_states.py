"""Keys or values of rows of different lengths, each where it lies.

Shape legend: B rows, Hkv key/value heads, S slots of the longest row, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only


class MaskPool:
    """Masks of the rows of one block, each for the row's own slots."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[Tensor, list[Tensor]]] = {}  # by the identity of the whole, which is kept with them

    def own(self, mask: Tensor, rows: Sequence[Tensor], groups: int) -> list[Tensor]:
        """Of a mask `[B, 1, T, S]` what concerns each row's slots, repeated for the heads of a group: `[1, 1, groups *
        T, S_b]`."""
        if id(mask) not in self._made:
            each = zip(mask.split(1), rows, strict=True)
            own = [part[..., : row.shape[2]].repeat(1, 1, groups, 1) for part, row in each]
            self._made[id(mask)] = mask, own
        return self._made[id(mask)][1]


class RowStates(Tensor):
    """`[B, Hkv, S, D]`, of which only the rows are there: `[1, Hkv, own length, D]` each, views of a cache.

    Attention that knows it goes from row to row and neither copies nor reads padding. For everything else it is a
    tensor like others, padded with zeros: made whenever something is computed with it, and not kept.

    masks: those of the block, which all layers share.
    """

    rows: Sequence[Tensor]
    masks: MaskPool

    @staticmethod
    def __new__(cls, rows: Sequence[Tensor], masks: MaskPool | None = None) -> RowStates:
        first = rows[0]
        shape = (len(rows), first.shape[1], max(row.shape[2] for row in rows), first.shape[3])
        states = Tensor._make_wrapper_subclass(cls, shape, dtype=first.dtype, device=first.device)
        states.rows, states.masks = rows, MaskPool() if masks is None else masks
        return states

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(cls, lambda states: padded(states.rows), (args, kwargs or {}))
        return func(*args, **kwargs)


def padded(rows: Sequence[Tensor]) -> Tensor:
    """Rows `[1, Hkv, S_b, D]` as one tensor `[B, Hkv, S, D]`."""
    slots = max(row.shape[2] for row in rows)
    # zeros: masked slots still enter the product with weight 0, and 0 * NaN is NaN
    out = rows[0].new_zeros(len(rows), rows[0].shape[1], slots, rows[0].shape[3])
    for place, row in enumerate(rows):
        out[place, :, : row.shape[2]] = row[0]
    return out
