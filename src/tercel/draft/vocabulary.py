"""The draft vocabulary: the `W` target tokens a head can propose (spec section 6)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from tercel.errors import TercelError

MAPS = ("d2t", "t2d")  # the tensors of a checkpoint that hold it


@dataclass(frozen=True)
class DraftVocabulary:
    """`ids` int64 `[W]`, target ids of the draft tokens, none twice (ascending in heads made here); `target_size` is
    `V`."""

    ids: Tensor
    target_size: int

    def __post_init__(self) -> None:
        ids = self.ids
        if ids.ndim != 1 or len(ids) == 0:
            raise TercelError("the draft vocabulary is empty; was the head saved completely?")
        lowest, highest = int(ids.min()), int(ids.max())
        if lowest < 0 or highest >= self.target_size:
            raise TercelError(
                f"the draft vocabulary names token {lowest if lowest < 0 else highest}, but the target has "
                f"{self.target_size} tokens; this map was built for another target"
            )
        if len(ids.unique()) != len(ids):
            raise TercelError("the draft vocabulary names a token twice; the map d2t is damaged")

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def pruned(self) -> bool:
        return len(self) < self.target_size

    @property
    def d2t(self) -> Tensor:
        """int64 `[W]`: what to add to a draft id to get its target id."""
        return self.ids - torch.arange(len(self.ids))

    @property
    def t2d(self) -> Tensor:
        """bool `[V]`: whether the target token is in the draft vocabulary."""
        mask = torch.zeros(self.target_size, dtype=torch.bool)
        mask[self.ids] = True
        return mask

    def to_draft(self) -> Tensor:
        """int64 `[V]`: draft id of each target token, -1 for those outside."""
        table = torch.full((self.target_size,), -1, dtype=torch.long)
        table[self.ids] = torch.arange(len(self.ids))
        return table

    @classmethod
    def full(cls, target_size: int) -> DraftVocabulary:
        return cls(torch.arange(target_size), target_size)

    @classmethod
    def most_frequent(cls, counts: Tensor, size: int, always: Iterable[int] = ()) -> DraftVocabulary:
        """The `size` tokens with the highest `counts` (`[V]`), in any case those in `always` (ends of turn).

        Ties go to the lower id, so that the same counts always give the same map.
        """
        target_size = len(counts)
        if size >= target_size:
            return cls.full(target_size)
        ranked = counts.double().clone()
        ranked[list(always)] = float("inf")
        order = torch.sort(ranked, descending=True, stable=True).indices[:size]
        return cls(order.sort().values, target_size)

    @classmethod
    def from_d2t(cls, d2t: Tensor, target_size: int, draft_size: int) -> DraftVocabulary:
        """Read the offsets of a checkpoint; `draft_size` is the number of rows of the head's `lm_head`."""
        if d2t.is_floating_point() or d2t.dtype == torch.bool:
            raise TercelError(f"d2t holds {str(d2t.dtype).removeprefix('torch.')} numbers, not whole offsets")
        if d2t.shape != (draft_size,):
            raise TercelError(
                f"d2t has {d2t.numel()} rows but the head's lm_head has {draft_size}; "
                "was this map built for another head?"
            )
        return cls(d2t.long() + torch.arange(draft_size), target_size)

    def coverage(self, counts: Tensor) -> float:
        """Share of the tokens counted in `counts` (`[V]`) that the head can propose."""
        return float(counts[self.ids].sum() / counts.sum().clamp(min=1))
