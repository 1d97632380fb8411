"""What a cache holds of some tokens of a row, one after another, for a row that begins alike.

Shape legend: t tokens, D any last dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class KeptTokens:
    """tensors: `[.., t, D]` each; views of where they lie, unless they were copied. form: what else their owner has to
    know of them to take them in again."""

    tensors: tuple[Tensor, ...]
    form: Any = None

    def __len__(self) -> int:
        return self.tensors[0].shape[-2]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def part(self, start: int, end: int) -> KeptTokens:
        """Of tokens `start` to `end` alone, as views."""
        return KeptTokens(tuple(tensor[..., start:end, :] for tensor in self.tensors), self.form)

    def with_first(self) -> KeptTokens:
        """With one token more before the others, of which nothing is held."""
        shapes = ((*tensor.shape[:-2], 1, tensor.shape[-1]) for tensor in self.tensors)
        more = (tensor.new_zeros(shape) for tensor, shape in zip(self.tensors, shapes, strict=True))
        return KeptTokens(tuple(torch.cat(pair, -2) for pair in zip(more, self.tensors, strict=True)), self.form)

    def copied(self) -> KeptTokens:
        """The same, in memory of its own."""
        copies = (tensor.clone(memory_format=torch.contiguous_format) for tensor in self.tensors)
        return KeptTokens(tuple(copies), self.form)
