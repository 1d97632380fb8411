"""What a profile found, as data: times beside their floors, steps by phase."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import torch

from tercel.decode.proposers import VANILLA
from tercel.measure.intervals import Interval
from tercel.measure.machine import Ceilings, describe, in_precision, in_threads, versions


@dataclass(frozen=True)
class Timed:
    """ms: median of a run; floor_ms: what the machine needs at least; bound: what for, memory or compute."""

    ms: Interval
    floor_ms: float
    bound: str

    @property
    def efficiency(self) -> float:
        """Floor over achieved."""
        return self.floor_ms / self.ms.value


@dataclass(frozen=True)
class Steps:
    """Whole steps of one proposer. ms: of a step, and share: of all time, by phase (`decode/clock.py`); tau: acceptance
    length; nodes: verified in a step; context: tokens before a step; the last two are means."""

    ms: Mapping[str, Interval]
    share: Mapping[str, Interval]
    tau: Interval
    nodes: float
    context: float
    steps: int

    @property
    def step_ms(self) -> float:
        return sum(phase.value for phase in self.ms.values())

    @property
    def token_ms(self) -> float:
        return self.step_ms / self.tau.value

    def to_json(self) -> dict[str, Any]:
        return {
            "step_ms": self.step_ms,
            "split_ms": _values(self.ms),
            "split_ms_ci95": _intervals(self.ms),
            "share": _values(self.share),
            "share_ci95": _intervals(self.share),
            "tau": self.tau.value,
            "tau_ci95": self.tau.ci95,
            "nodes": self.nodes,
            "context": self.context,
            "steps": self.steps,
        }


@dataclass(frozen=True)
class Profile:
    """context: the length that stands for all where one has to. forward: by context and width, the output layer apart,
    which is `output`. levels: of a head, by name (`profile_cases.py`). steps: by proposer."""

    target: str
    head: str | None
    dtype: str
    device: torch.device
    threads: int
    context: int
    forward: Mapping[int, Mapping[int, Timed]]
    output: Mapping[int, Timed]
    levels: Mapping[str, Timed]
    ceilings: Ceilings
    steps: Mapping[str, Steps]
    rounds: int
    notes: tuple[str, ...] = ()
    weights: str | None = None
    timestamp: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    @property
    def method(self) -> str:
        """Whose steps stand for decoding: those of the proposer that drafts, if there is one."""
        return next((name for name in self.steps if name != VANILLA), VANILLA)

    @property
    def usual(self) -> Mapping[int, Timed]:
        """Forwards behind `context` tokens, by width."""
        return self.forward[self.context]

    def title(self) -> str:
        drafted = f"{self.head} on " if self.head else ""
        precision = in_precision(self.dtype, self.weights)
        return f"{drafted}{self.target}, {precision}, {self.device}, {in_threads(self.threads)}"

    def to_json(self) -> dict[str, Any]:
        """`forward_ms` and `floor_ms` are those at `context`, `step_share` that of `method`."""
        usual = _timed(self.usual)
        return {
            "target": self.target,
            "head": self.head,
            "dtype": self.dtype,
            "weights": self.weights,
            "device": str(self.device),
            "threads": self.threads,
            "machine": describe(self.device),
            "ceilings": self.ceilings.to_json(),
            "context": self.context,
            "forward_ms": usual["ms"],
            "forward_ms_ci95": usual["ms_ci95"],
            "floor_ms": usual["floor_ms"],
            "efficiency": usual["efficiency"],
            "bound": usual["bound"],
            "by_context": {str(length): _timed(widths) for length, widths in self.forward.items()},
            "output_layer": _timed(self.output),
            "head_levels": _timed(self.levels),
            "method": self.method,
            "step_share": _values(self.steps[self.method].share),
            "steps": {name: steps.to_json() for name, steps in self.steps.items()},
            "rounds": self.rounds,
            "notes": list(self.notes),
            "versions": versions(),
            "timestamp": self.timestamp,
        }


def _timed(of: Mapping[Any, Timed]) -> dict[str, dict[str, Any]]:
    return {
        "ms": {str(key): timed.ms.value for key, timed in of.items()},
        "ms_ci95": {str(key): timed.ms.ci95 for key, timed in of.items()},
        "floor_ms": {str(key): timed.floor_ms for key, timed in of.items()},
        "efficiency": {str(key): timed.efficiency for key, timed in of.items()},
        "bound": {str(key): timed.bound for key, timed in of.items()},
    }


def _values(of: Mapping[str, Interval]) -> dict[str, float]:
    return {name: interval.value for name, interval in of.items()}


def _intervals(of: Mapping[str, Interval]) -> dict[str, list[float] | None]:
    return {name: interval.ci95 for name, interval in of.items()}


def in_ms(value: float) -> str:
    """Milliseconds as people read them: three digits that count, down to a microsecond."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:,.{digits}f}"
