"""Many small pieces of work timed in turn, so that whatever slows the machine down slows all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

from tercel.decode.clock import PhaseClock

Key = TypeVar("Key")
OnRun = Callable[[int, int], None]


@dataclass(frozen=True)
class Patience:
    """At least `least` rounds, then more for as long as `seconds` have not passed, up to `most`. Six are the fewest
    that give a median an interval."""

    seconds: float
    least: int = 6
    most: int = 25


def time_in_turn(
    works: Mapping[Key, Callable[[], object]], device: torch.device, patience: Patience, progress: OnRun
) -> dict[Key, list[float]]:
    """Milliseconds of every run of every work, a run a round, each right after one that is not counted: in decoding too
    a step comes after others like it. The first of a round moves on from round to round. The device's own work is
    waited for before and after.

    progress: runs done, and at most to do.
    """
    clock, keys = PhaseClock(device), list(works)
    total = len(keys) * (patience.most + 1)
    for number, work in enumerate(works.values(), 1):
        work()
        progress(number, total)
    taken: dict[Key, list[float]] = {key: [] for key in keys}
    began = time.monotonic()
    for turn in range(patience.most):
        if turn >= patience.least and time.monotonic() - began > patience.seconds:
            break
        first = turn % len(keys)
        for number, key in enumerate(keys[first:] + keys[:first], 1):
            works[key]()
            started = clock.now()
            works[key]()
            taken[key].append((clock.now() - started) * 1e3)
            progress((turn + 1) * len(keys) + number, total)
    return taken
