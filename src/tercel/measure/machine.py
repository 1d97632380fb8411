"""What this machine could do at best: how fast it reads memory and multiplies, and what it is."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy
import torch
import transformers

from tercel.decode.clock import PhaseClock
from tercel.measure.intervals import Interval, median
from tercel.memory import available_memory

LEAST_READ, MOST_READ = 32 << 20, 1 << 30  # bytes
LARGEST_MATRIX, MATRIX_SECONDS = 8192, 0.02
_WORTH_TELLING = ("avx2", "avx512_f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8", "bf16")


@dataclass(frozen=True)
class Work:
    """What a piece of work has to read at least (bytes) and to do (floating-point operations, two for each
    multiply-accumulate)."""

    bytes: float
    flops: float


@dataclass(frozen=True)
class Rate:
    """Bytes or operations a second: the best of all runs, and the median, which tells how steady the machine was."""

    best: float
    median: Interval

    @property
    def steadiness(self) -> float:
        """Median over best: far below 1 where something else ran at the same time."""
        return self.median.value / self.best

    def to_json(self, name: str) -> dict[str, Any]:
        """In billions."""
        middle, spread = self.median.value / 1e9, self.median.ci95
        return {
            name: self.best / 1e9,
            f"{name}_median": middle,
            f"{name}_median_ci95": None if spread is None else [bound / 1e9 for bound in spread],
        }


@dataclass(frozen=True)
class Ceilings:
    """bandwidth: bytes that are read; peak: floating-point operations, in the data type at hand."""

    bandwidth: Rate
    peak: Rate

    @property
    def steadiness(self) -> float:
        return min(self.bandwidth.steadiness, self.peak.steadiness)

    def floor_ms(self, work: Work) -> float:
        """No forward is faster, reading and multiplying at the same time."""
        return 1e3 * max(work.bytes / self.bandwidth.best, work.flops / self.peak.best)

    def bound(self, work: Work) -> str:
        """Which of the two it is."""
        reads = work.bytes / self.bandwidth.best >= work.flops / self.peak.best
        return "memory" if reads else "compute"

    def to_json(self) -> dict[str, Any]:
        return {**self.bandwidth.to_json("bandwidth_gb_s"), **self.peak.to_json("peak_gflop_s")}


@dataclass(frozen=True)
class Probe:
    """A piece of work that does nothing but reach a ceiling: `amount` bytes or operations."""

    run: Callable[[], object]
    amount: float

    def rate(self, ms: Sequence[float]) -> Rate:
        """From the milliseconds of its runs."""
        middle = median(ms)
        seen = Interval(*(1e3 * self.amount / value for value in (middle.value, middle.high, middle.low)))
        return Rate(1e3 * self.amount / min(ms), seen)


def reading(like: int, device: torch.device) -> Probe:
    """Reads as much as the weights that it is compared with (`like` bytes): what fits into the processor's cache is
    read from there again, as weights are."""
    room = available_memory(device)
    size = min(max(like, LEAST_READ), MOST_READ, MOST_READ if room is None else max(LEAST_READ, room // 4))
    words = torch.ones(size // 8, dtype=torch.int64, device=device)
    return Probe(words.sum, words.nbytes)  # a product of matrix and vector reads at about half the rate of this sum


def multiplying(dtype: torch.dtype, device: torch.device) -> Probe:
    """Multiplies square matrices, as large as it takes to be busy for a while."""
    side = 256
    while side < LARGEST_MATRIX and _seconds(probe := _product(side, dtype, device), device) < MATRIX_SECONDS:
        side *= 2
    return probe if side < LARGEST_MATRIX else _product(side, dtype, device)


def _product(side: int, dtype: torch.dtype, device: torch.device) -> Probe:
    matrix = torch.ones(side, side, dtype=dtype, device=device)
    return Probe(lambda: matrix @ matrix, 2.0 * side**3)


def _seconds(probe: Probe, device: torch.device) -> float:
    """Of the quickest of a few runs."""
    clock, taken = PhaseClock(device), []
    for _ in range(4):
        started = clock.now()
        probe.run()
        taken.append(clock.now() - started)
    return min(taken)


def versions() -> dict[str, str]:
    """Of what computes here."""
    return {
        "tercel": version("tercel"),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
    }


def in_precision(dtype: str, weights: str | None) -> str:
    """For titles: what is computed in, and the weights if they are not the model's own."""
    return dtype if weights is None else f"{dtype} with {weights} weights"


def in_threads(count: int) -> str:
    return f"{count} thread" if count == 1 else f"{count} threads"


def describe(device: torch.device) -> dict[str, Any]:
    """The processor, what it can compute with, and the accelerator if that is where the models lie."""
    able = torch.cpu.get_capabilities()
    return {
        "processor": able.get("cpu_name") or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "instructions": [name for name in _WORTH_TELLING if able.get(name)],
        "accelerator": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
    }
