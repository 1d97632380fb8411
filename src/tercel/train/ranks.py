"""Several processes that train one head: which micro-batches are whose, and the sum over all of them.

Every rank has the whole plan, the whole head and the same optimizer. In an optimizer step it learns from its own
micro-batches; then gradients and counters are summed over all ranks, once, and each makes the same update. What is
written (`RunWriter`) is written by the first alone.

This is the seam for that: commands train in one process (`Alone`), and tests alone have several.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

Step = list[list[int]]  # an optimizer step: the chats of each of its micro-batches


def share(plan: Sequence[Step], rank: int, ranks: int) -> list[Step]:
    """What of every step of the plan is `rank`'s, of `ranks` in all.

    Micro-batches go round, on from step to step, so that no rank has more than one more than another: neither in a
    step nor in any number of steps from the first. A rank may have none in a step.
    """
    mine, before = [], 0
    for step in plan:
        mine.append(step[(rank - before) % ranks :: ranks])
        before += len(step)
    return mine


class Ranks(Protocol):
    """The processes of a run, as one of them sees them."""

    @property
    def rank(self) -> int:
        """Which one this is, from 0."""
        ...

    @property
    def count(self) -> int:
        """How many there are."""
        ...

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Make each tensor the sum of those of all ranks, in place; all ranks have to call this with equal shapes.

        Gradients lie on the head's device, counters (float64, int64) on the CPU.
        """
        ...


class Alone:
    """The only process of a run."""

    rank, count = 0, 1

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Leaves the tensors as they are."""
