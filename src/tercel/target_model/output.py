"""What one forward of a target gives.

Shape legend: B rows, T block length, K hidden size, n captured layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TargetOutput:
    """What one forward over a block gives.

    hidden: `[B, T, K]`, after the final norm (what the output layer takes).
    layers: for each captured layer `[B, T, K]`, the residual stream entering it.
    """

    hidden: Tensor
    layers: tuple[Tensor, ...]

    @property
    def features(self) -> Tensor:
        """`[B, T, n*K]`, low to high, not normalised (paper section 3.1)."""
        return torch.cat(self.layers, dim=-1)

    def of_row(self, row: int, length: int) -> TargetOutput:
        """The first `length` tokens of one row, `[1, T, ..]`."""
        part = slice(row, row + 1), slice(length)
        return TargetOutput(self.hidden[part], tuple(layer[part] for layer in self.layers))

    def first(self, length: int) -> TargetOutput:
        """The first `length` tokens of every row."""
        return TargetOutput(self.hidden[:, :length], tuple(layer[:, :length] for layer in self.layers))

    def part(self, start: int) -> TargetOutput:
        """From token `start` on."""
        return TargetOutput(self.hidden[:, start:], tuple(layer[:, start:] for layer in self.layers))


def joined(outputs: Sequence[TargetOutput], dim: int) -> TargetOutput:
    """Outputs of rows (0) or of tokens one after another (1) as one."""
    if len(outputs) == 1:
        return outputs[0]
    layers = zip(*(output.layers for output in outputs), strict=True)
    return TargetOutput(
        torch.cat([output.hidden for output in outputs], dim),
        tuple(torch.cat(parts, dim) for parts in layers),
    )
