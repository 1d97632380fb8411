"""Compute in a low precision, learn in float32: a working copy of the head beside its master weights and their mean."""

from __future__ import annotations

import copy

import torch
from torch import nn

from tercel.draft.head import DraftHead


class MasterWeights:
    """`working` computes forward and backward in `dtype`; `master` (float32) is what the optimizer steps.

    With `dtype` float32 both are the same module. decay: of a running mean of the master's weights, `mean`, which then
    is what is shown of the run; with 0 there is none.
    """

    def __init__(self, master: DraftHead, dtype: torch.dtype, decay: float = 0.0) -> None:
        self.master, self.decay = master, decay
        self.mean = copy.deepcopy(master) if decay else None
        self.working = master if dtype == torch.float32 else copy.deepcopy(master).to(dtype)
        self.pairs: list[tuple[nn.Parameter, nn.Parameter]] = (
            [] if self.working is master else list(zip(master.parameters(), self.working.parameters(), strict=True))
        )

    @property
    def shown(self) -> DraftHead:
        """What is saved, float32."""
        return self.master if self.mean is None else self.mean

    def to_measure(self) -> DraftHead:
        """What is evaluated, in the working precision."""
        return self.working if self.mean is None else copy.deepcopy(self.mean).to(self.working.dtype)

    @torch.no_grad()
    def follow(self, step: int) -> None:
        """Take the master's weights after `step` optimizer steps into the mean. It looks back less far at first, when
        they are soon out of date."""
        if self.mean is not None:
            share = 1 - min(self.decay, (1 + step) / (10 + step))
            for mean, own in zip(self.mean.parameters(), self.master.parameters(), strict=True):
                mean.lerp_(own, share)

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
