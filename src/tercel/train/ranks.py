"""Several processes that train one head: which micro-batches are whose, and the sum over all of them.

Every rank has the whole plan, the whole head and the same optimizer. In an optimizer step it learns from its own
micro-batches; then gradients and counters are summed over all ranks, once, and each makes the same update. What is
written (`RunWriter`) is written by the first alone.

`Alone` is a run of one process; `group.py` has the ranks that `torchrun` starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeVar

from torch import Tensor

from tercel.errors import TercelError

T = TypeVar("T")
Step = list[list[int]]  # an optimizer step: the chats of each of its micro-batches


def share(plan: Sequence[Step], rank: int, ranks: int) -> list[Step]:
    """What of every step of the plan is `rank`'s, of `ranks` in all.

    Micro-batches go round, on from step to step, so that no rank has more than one more than another: neither in a
    step nor in any number of steps from the first. What a rank has fewer than others in a step is filled up with empty
    ones (`dealt`).
    """
    mine, before = [], 0
    for step in plan:
        mine.append(dealt(step, (rank - before) % ranks, ranks))
        before += len(step)
    return mine


def dealt(batches: Sequence[list[int]], rank: int, ranks: int) -> list[list[int]]:
    """`rank`'s share of some batches, with an empty one at the end where others have one more, so that all have as
    many: where a target is split over the ranks, none can compute without the others."""
    mine = list(batches[rank::ranks])
    return mine + [[]] * (-(-len(batches) // ranks) - len(mine))


def collected(parts: Sequence[Sequence[T]]) -> list[T]:
    """What the ranks made of their shares (`dealt`, without the empty ones), in the order of the pass."""
    ranks = len(parts)
    return [parts[number % ranks][number // ranks] for number in range(sum(map(len, parts)))]


class RankLostError(TercelError):
    """Another rank of the run has ended, or does not answer."""


class Ranks(Protocol):
    """The processes of a run, as one of them sees them. All ranks have to call the methods in the same order, with
    tensors of equal shapes on like devices. Each raises `RankLostError` if another rank is gone."""

    @property
    def rank(self) -> int:
        """Which one this is, from 0."""
        ...

    @property
    def count(self) -> int:
        """How many there are."""
        ...

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Make each tensor the sum of those of all ranks, in place.

        Gradients lie on the head's device, counters (float64, int64) on the CPU.
        """
        ...

    def gather(self, value: T) -> list[T]:
        """A small value of each rank, in their order."""
        ...

    def take_first(self, tensors: Sequence[Tensor]) -> None:
        """Make each tensor what it is at the first rank, in place."""
        ...

    def meeting(self) -> AbstractContextManager[object]:
        """Within, ranks meet in the code of a library (a target that is split over them): its errors that say that
        one is gone become `RankLostError`."""
        ...


class Alone:
    """The only process of a run."""

    rank, count = 0, 1

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Leaves the tensors as they are."""

    def gather(self, value: T) -> list[T]:
        return [value]

    def take_first(self, tensors: Sequence[Tensor]) -> None:
        """Leaves the tensors as they are."""

    def meeting(self) -> AbstractContextManager[object]:
        return nullcontext()
