"""Compute in a low precision, learn in float32: a working copy of the head beside its master weights."""

from __future__ import annotations

import copy

import torch
from torch import nn

from tercel.draft.head import DraftHead


class MasterWeights:
    """`working` computes forward and backward in `dtype`; `master` (float32) is what the optimizer steps.

    With `dtype` float32 both are the same module.
    """

    def __init__(self, master: DraftHead, dtype: torch.dtype) -> None:
        self.master = master
        self.working = master if dtype == torch.float32 else copy.deepcopy(master).to(dtype)
        self.pairs: list[tuple[nn.Parameter, nn.Parameter]] = (
            [] if self.working is master else list(zip(master.parameters(), self.working.parameters(), strict=True))
        )

    @torch.no_grad()
    def collect_gradients(self) -> None:
        """Add the working copy's gradients to the master's, and clear them (after each micro-batch)."""
        for master, working in self.pairs:
            if working.grad is None:
                continue
            if master.grad is None:
                master.grad = working.grad.float()
            else:
                master.grad.add_(working.grad)
            working.grad = None

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the master's weights into the working copy (after each optimizer step)."""
        for master, working in self.pairs:
            working.copy_(master)
