"""Where a step's time goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

PHASES = ("draft", "target", "verify", "cache", "host")


class PhaseClock:
    """Adds up seconds by phase; whatever is between two phases is `host`.

    Waits for its device at every border where that is not the CPU, so that a phase is charged for its own kernels.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._mark = time.perf_counter()

    def now(self) -> float:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return time.perf_counter()

    def restart(self) -> None:
        """Forget the time since the last border."""
        self._mark = self.now()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = self.now()
        self.seconds["host"] += started - self._mark
        yield
        self._mark = self.now()
        self.seconds[name] += self._mark - started
