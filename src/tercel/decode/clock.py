"""Where a step's time goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

PHASES = ("target", "head", "tree", "verify", "cache", "host")
DRAFT, HOST = "draft", "host"
_DRAFTING = ("head", "tree")


class PhaseClock:
    """Adds up seconds by phase; whatever is in none is `host`. A phase within another has its time for itself.

    Waits for its device at every border where that is not the CPU, so that a phase is charged for its own kernels.

    fine: tell a head's forwards (`head`) from all else that drafting is (`tree`); they are one phase, `draft`, where
    that is off. A tree has such a border at every level, so it is only on, if left out, where nothing waits for it.
    """

    def __init__(self, device: torch.device, fine: bool | None = None) -> None:
        self._device = device
        fine = device.type == "cpu" if fine is None else fine
        self._booked = {name: DRAFT if name in _DRAFTING and not fine else name for name in PHASES}
        self.seconds = dict.fromkeys(self._booked.values(), 0.0)
        self._phase = HOST
        self._mark = time.perf_counter()

    def now(self) -> float:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return time.perf_counter()

    def restart(self) -> None:
        """Forget the time since the last border."""
        self._phase, self._mark = HOST, self.now()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        outer = self._enter(self._booked[name])
        try:
            yield
        finally:
            self._enter(outer)

    def _enter(self, phase: str) -> str:
        """Returns the phase that it was until now, to which the time since the last border goes."""
        before = self._phase
        if phase != before:
            now = self.now()
            self.seconds[before] += now - self._mark
            self._phase, self._mark = phase, now
        return before
