"""A benchmark in the layout of the paper's Table 1: a line a method, a column a task and their mean, speedup and τ with
95 % intervals, the paper's numbers beside, and which differences the data support.

A column's best method and each other one are compared by paired bootstrap: the interval of their difference over the
same questions. Where it holds 0, the two are not told apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

from tercel.measure import paper
from tercel.measure.intervals import Interval
from tercel.measure.samples import SPEED, TAU, Samples, difference, difference_of_ratios, ratio, samples_of, value
from tercel.measure.summary import TRANSFORMERS, VANILLA, BenchReport, MethodSummary

Standing = Literal["best", "level", "behind", "unknown"]
BEST: Final = "best"
LEVEL: Final = "level"
BEHIND: Final = "behind"
UNKNOWN: Final = "unknown"
MARKS: dict[Standing, str] = {BEST: "*", LEVEL: "~", BEHIND: "", UNKNOWN: ""}
LEGEND = "* best of its column; ~ not told apart from the best by these questions (paired bootstrap, 95 %)"


@dataclass(frozen=True)
class Number:
    """interval: with 95 %, None where it was not measured; standing: in its column."""

    interval: Interval | None
    standing: Standing = UNKNOWN


@dataclass(frozen=True)
class Cell:
    """paper: speedup and τ of the paper for that task, method and temperature, if it has them."""

    speedup: Number
    tau: Number
    paper: tuple[float, float] | None


@dataclass(frozen=True)
class Line:
    """A method: its cells by task and `paper.MEAN`; identical: share of questions answered with the tokens of
    token-by-token decoding, all tasks together, None where they need not be; lossy: the rule by which its drafts are
    accepted, if that changes the text."""

    method: str
    cells: dict[str, Cell]
    identical: float | None
    lossy: str | None = None

    @property
    def title(self) -> str:
        return self.method if self.lossy is None else f"{self.method} (LOSSY)"


@dataclass(frozen=True)
class Table1:
    """Of one temperature. columns: tasks, and their mean if there are several. told_apart: (method, other) → whether
    the first is higher in speedup and in τ than the other by what all tasks say together: -1, 0 (open) or 1."""

    temperature: float
    columns: tuple[str, ...]
    lines: tuple[Line, ...]
    told_apart: dict[tuple[str, str], tuple[int, int]]

    def to_json(self) -> dict[str, Any]:
        return {
            "temperature": self.temperature,
            "methods": {
                line.method: {name: _cell_json(cell) for name, cell in line.cells.items()} for line in self.lines
            },
            "identical": {line.method: line.identical for line in self.lines},
            "lossy": {line.method: line.lossy for line in self.lines},
            "told_apart": [
                {"method": one, "other": other, "speedup": signs[0], "tau": signs[1]}
                for (one, other), signs in self.told_apart.items()
            ],
        }


def table1(report: BenchReport, taus: BenchReport | None = None) -> Table1:
    """The table of one benchmark. taus: another of the same questions, whose τ is shown instead (of other trees)."""
    other = taus or report
    samples = samples_of(report).only(SPEED).merged(samples_of(other).only(TAU))
    tasks = [task.name for task in report.tasks]
    columns = (*tasks, paper.MEAN) if len(tasks) > 1 else tuple(tasks)
    methods = list(dict.fromkeys(name for task in report.tasks for name in task.methods))
    temperature = report.params.temperature
    cells: dict[str, dict[str, Cell]] = {method: {} for method in methods}
    for column in columns:
        over_tasks = tasks if column == paper.MEAN else [column]
        speedups = {name: _speedup(samples, report, name, over_tasks) for name in methods}
        lengths = {name: _tau(samples, other, name, over_tasks) for name in methods}
        by_speed = _standings(speedups, partial(_faster, samples, tasks=over_tasks))
        by_tau = _standings(lengths, partial(_longer, samples, tasks=over_tasks))
        for name in methods:
            cells[name][column] = Cell(
                Number(speedups[name], by_speed[name]),
                Number(lengths[name], by_tau[name]),
                paper.table1(temperature, name, column),
            )
    drafting = [name for name in methods if name != TRANSFORMERS]
    told_apart = {
        (one, another): (
            _sign(_faster(samples, one, another, tasks)),
            _sign(_longer(samples, one, another, tasks)),
        )
        for place, one in enumerate(drafting)
        for another in drafting[place + 1 :]
    }
    lossy = {name: summary.lossy for task in report.tasks for name, summary in task.methods.items()}
    lines = tuple(Line(name, cells[name], _identical(report, name), lossy[name]) for name in methods)
    return Table1(temperature, columns, lines, told_apart)


def _speedup(samples: Samples, report: BenchReport, method: str, tasks: Sequence[str]) -> Interval | None:
    if len(tasks) == 1:  # as the report's own table has it
        found = _summary(report, method, tasks[0])
        return None if found is None else found.speedup
    return samples.interval(ratio, [f"{SPEED}/{method}", f"{SPEED}/{VANILLA}"], tasks)


def _tau(samples: Samples, report: BenchReport, method: str, tasks: Sequence[str]) -> Interval | None:
    if len(tasks) == 1:
        found = _summary(report, method, tasks[0])
        return None if found is None else found.tau
    return samples.interval(value, [f"{TAU}/{method}"], tasks)


def _summary(report: BenchReport, method: str, task: str) -> MethodSummary | None:
    return next((found.methods.get(method) for found in report.tasks if found.name == task), None)


def _faster(samples: Samples, one: str, other: str, tasks: Sequence[str]) -> Interval | None:
    """How much faster one method is than the other, in multiples of token-by-token decoding."""
    names = [f"{SPEED}/{name}" for name in (one, other, VANILLA)]
    return samples.interval(difference_of_ratios, names, tasks)


def _longer(samples: Samples, one: str, other: str, tasks: Sequence[str]) -> Interval | None:
    return samples.interval(difference, [f"{TAU}/{one}", f"{TAU}/{other}"], tasks)


def _standings(
    found: dict[str, Interval | None], against: Callable[[str, str], Interval | None]
) -> dict[str, Standing]:
    known = {name: interval.value for name, interval in found.items() if interval is not None}
    standings: dict[str, Standing] = dict.fromkeys(found, UNKNOWN)
    if len(known) < 2:
        return standings
    best = max(known, key=known.__getitem__)
    for name in known:
        gap = None if name == best else against(best, name)
        if name == best:
            standings[name] = BEST
        elif gap is not None and gap.ci95 is not None:
            standings[name] = BEHIND if gap.low > 0 else LEVEL
    return standings


def _sign(interval: Interval | None) -> int:
    if interval is None or interval.ci95 is None:
        return 0
    return 1 if interval.low > 0 else -1 if interval.high < 0 else 0


def _identical(report: BenchReport, method: str) -> float | None:
    """Of all questions of all tasks."""
    found = [(task, task.methods[method]) for task in report.tasks if method in task.methods]
    if any(summary.identical is None for _, summary in found):
        return None
    rows = [row for task, _ in found for row in task.rows]
    return sum(row.identical(method) for row in rows) / len(rows)


def _cell_json(cell: Cell) -> dict[str, Any]:
    told: dict[str, Any] = {}
    for name, number in (("speedup", cell.speedup), ("tau", cell.tau)):
        told[name] = None if number.interval is None else number.interval.value
        told[f"{name}_ci95"] = None if number.interval is None else number.interval.ci95
        told[f"{name}_standing"] = number.standing
    told["paper_speedup"], told["paper_tau"] = cell.paper or (None, None)
    return told
