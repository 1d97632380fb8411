"""Rates counted over the same questions, and what the data say of them together: a mean over tasks, a difference of two
methods, a slope; each with the interval of a paired bootstrap within every task.

Shape legend: Q questions of a task, R bootstrap resamples.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from tercel.errors import TercelError
from tercel.measure.intervals import RESAMPLES, Interval, expanded
from tercel.measure.summary import BenchReport

Column = tuple[tuple[float, ...], tuple[float, ...]]  # numerator and denominator of every question
Statistic = Callable[..., np.ndarray]  # of the rates `[R]` of some quantities

TAU, SPEED = "tau", "speed"


def value(rate: np.ndarray) -> np.ndarray:
    return rate


def difference(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    return first - second


def ratio(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    return first / second


def difference_of_ratios(first: np.ndarray, second: np.ndarray, base: np.ndarray) -> np.ndarray:
    return (first - second) / base


def slope(*rates: np.ndarray) -> np.ndarray:
    """Per place, by least squares over the places 0, 1, … of these rates."""
    places = np.arange(len(rates)) - (len(rates) - 1) / 2
    return np.tensordot(places / (places @ places), np.stack(rates), 1)


def difference_of_slopes(*rates: np.ndarray) -> np.ndarray:
    """Of the first half of these rates and the second."""
    return slope(*rates[: len(rates) // 2]) - slope(*rates[len(rates) // 2 :])


def smallest_ratio(*rates: np.ndarray) -> np.ndarray:
    """Of the first half of these rates, each over its fellow in the second."""
    half = len(rates) // 2
    return np.min([a / b for a, b in zip(rates[:half], rates[half:], strict=True)], axis=0)


@dataclass(frozen=True)
class Samples:
    """columns: quantity → task → numerators and denominators `[Q]`. In a task the questions of all quantities are the
    same, in the same order, so that what makes a question hard for all cancels."""

    columns: Mapping[str, Mapping[str, Column]]
    _known: dict[tuple[str, str], np.ndarray] = field(default_factory=dict, compare=False, repr=False)

    def tasks(self, *names: str) -> list[str]:
        """Where all of these quantities were measured."""
        if not all(name in self.columns for name in names):
            return []
        first, *others = (self.columns[name] for name in names)
        return [task for task in first if all(task in other for other in others)]

    def interval(
        self, statistic: Statistic, names: Sequence[str], tasks: Sequence[str] | None = None
    ) -> Interval | None:
        """The mean over tasks of `statistic(rate of each name)`; None where no task has them all.

        Raises `TercelError` if the questions of a task are not the same for all.
        """
        known = self.tasks(*names)
        wanted = known if tasks is None else [task for task in tasks if task in known]
        if not wanted:
            return None

        with np.errstate(divide="ignore", invalid="ignore"):
            found = np.stack([self._of_task(statistic, names, task) for task in wanted]).mean(0)
        counts = [len(self.columns[names[0]][task][0]) for task in wanted]
        return expanded(float(found[0]), found[1:], counts)

    def _of_task(self, statistic: Statistic, names: Sequence[str], task: str) -> np.ndarray:
        """`[1 + R]`: of all questions, then of the resamples."""
        if len({len(part) for name in names for part in self.columns[name][task]}) > 1:
            raise TercelError(f"{', '.join(names)} were not measured on the same questions of {task}; measure again")
        return statistic(*(self._rates(name, task) for name in names))

    def _rates(self, name: str, task: str) -> np.ndarray:
        """`[1 + R]`; the same resamples of the questions for every quantity, drawn once."""
        if (name, task) not in self._known:
            above, below = (np.asarray(part, dtype=np.float64) for part in self.columns[name][task])
            times = _times(task, len(above))
            self._known[name, task] = (times @ above) / (times @ below)
        return self._known[name, task]

    def only(self, kind: str) -> Samples:
        """Those of `KIND/…`."""
        return Samples({name: tasks for name, tasks in self.columns.items() if name.startswith(f"{kind}/")})

    def merged(self, other: Samples) -> Samples:
        return Samples({**self.columns, **other.columns})

    def to_json(self) -> dict[str, Any]:
        return {
            name: {task: [list(part) for part in column] for task, column in tasks.items()}
            for name, tasks in self.columns.items()
        }

    @classmethod
    def from_json(cls, values: Any) -> Samples:
        """Raises `TypeError`, `ValueError` or `AttributeError` for another form."""
        return cls(
            {
                str(name): {
                    str(task): (tuple(map(float, above)), tuple(map(float, below)))
                    for task, (above, below) in tasks.items()
                }
                for name, tasks in values.items()
            }
        )


@cache
def _times(task: str, count: int) -> np.ndarray:
    """How often each of so many questions is in a resample, `[1 + R, Q]`; in the first, which is no resample, once.
    Every task has resamples of its own."""
    generator = np.random.default_rng(zlib.crc32(task.encode(errors="surrogatepass")))
    drawn = generator.multinomial(count, np.full(count, 1 / count), RESAMPLES)
    return np.concatenate([np.ones((1, count)), drawn])


def samples_of(report: BenchReport) -> Samples:
    """`tau/METHOD` (tokens a step) and `speed/METHOD` (tokens a second) of a benchmark."""
    columns: dict[str, dict[str, Column]] = {}
    for task in report.tasks:
        for method, summary in task.methods.items():
            tokens = tuple(float(row.tokens(method)) for row in task.rows)
            seconds = tuple(row.seconds(method) for row in task.rows)
            columns.setdefault(f"{SPEED}/{method}", {})[task.name] = (tokens, seconds)
            if summary.tau is not None:
                drafted = tuple(float(row.drafted_tokens(method)) for row in task.rows)
                steps = tuple(float(row.steps(method)) for row in task.rows)
                columns.setdefault(f"{TAU}/{method}", {})[task.name] = (drafted, steps)
    return Samples(columns)
