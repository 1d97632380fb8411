"""The τ that a run of some size may be expected to reach, from runs that were measured (`bench/data_curve.py`).

Two curves (`scaling.py`): τ against supervised tokens that were learned from, repeats counted, with all the data (the
budget), and against different supervised tokens at a fixed number of steps (the data). A run has both, so what it
gains over 1 is taken to be that of its budget, times what its data give of what all the data gave.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

from tercel.errors import TercelError
from tercel.files import write_json
from tercel.measure.intervals import Interval
from tercel.measure.scaling import Point, choose
from tercel.reading import read_json
from tercel.train.config import EAGLE3, TrainConfig

SHIPPED = "scaling.json"
BUDGET, DATA = "budget", "data"


@dataclass(frozen=True)
class Measured:
    """A run. axis: which curve it belongs to; supervised: different supervised tokens; seen: supervised tokens learned
    from, repeats counted; tau: held-out, over all that was held out of the whole data set."""

    axis: str
    supervised: int
    seen: int
    steps: int | None
    tau: float


@dataclass(frozen=True)
class Runs:
    """Measured runs of one target and recipe, but for their size. ttt_steps: also the length of the chains that τ is
    of; made: when, ISO."""

    target: str
    ttt_steps: int
    made: str
    runs: tuple[Measured, ...]

    @classmethod
    def read(cls, path: Path) -> Runs:
        """Raises `TercelError` if the file is not of this form."""
        found, names = read_json(path), [f.name for f in fields(Measured)]
        try:
            runs = tuple(Measured(**{name: run[name] for name in names}) for run in found["runs"])
            return cls(str(found["target"]), int(found["ttt_steps"]), str(found["made"]), runs)
        except (KeyError, TypeError, ValueError) as error:
            raise TercelError(
                f"{path} holds no measured runs ({error!r}); write it with bench/data_curve.py"
            ) from error

    def write(self, path: Path, **more: Any) -> None:
        """more: what else the file tells."""
        told = {"target": self.target, "ttt_steps": self.ttt_steps, "made": self.made}
        write_json(path, {"format": 1, **told, **more, "runs": [vars(run) for run in self.runs]})

    def points(self, axis: str) -> list[Point]:
        """Of one curve: against what is different in it."""
        return [Point(run.supervised if axis == DATA else run.seen, run.tau) for run in self.runs if run.axis == axis]


@dataclass(frozen=True)
class Expected:
    """tau: with a 95 % interval, None where nothing can be said; told: where it comes from, or why there is none."""

    tau: Interval | None
    told: str


def shipped_runs() -> Runs:
    return Runs.read(Path(str(files("tercel.measure") / SHIPPED)))


def expected_tau(config: TrainConfig, supervised: int, seen: float, runs: Runs | None = None) -> Expected:
    """Of a run of `config` on so many different supervised tokens, `seen` with repeats. runs: the shipped, if None."""
    runs = runs or shipped_runs()
    if config.start_from:
        return Expected(None, "the runs that were measured began with new heads, not with a trained one")
    if config.method != EAGLE3:
        return Expected(None, f"the runs that were measured are of {EAGLE3}, not of {config.method}")
    tau = predicted(runs, supervised, seen)
    largest = max(run.seen for run in runs.runs)
    told = [f"{len(runs.runs)} runs for {runs.target}, chains of {runs.ttt_steps} drafts, of {runs.made}"]
    if config.ttt_steps != runs.ttt_steps:
        told.append(f"this run's chains have {config.ttt_steps}")
    if seen > 2 * largest:
        told.append(f"{seen / largest:.1f} times as much as the largest of them")
    return Expected(tau, "; ".join(told))


def predicted(runs: Runs, supervised: float, seen: float) -> Interval:
    """τ with its interval. Raises `TercelError` if there are too few runs of different budgets."""
    budget = choose(runs.points(BUDGET))[0].predict(seen)
    data = runs.points(DATA)
    if len(data) < 3:
        return budget
    curve = choose(data)[0]
    most = max(point.tokens for point in data)
    here, whole = curve.predict(min(supervised, 4 * most)), curve.curve.at(most)
    scale = _gain(whole)
    return Interval(
        *(
            1 + max(0.0, b - 1) * max(0.0, d - 1) / scale
            for b, d in ((budget.value, here.value), (budget.low, here.low), (budget.high, here.high))
        )
    )


def _gain(tau: float) -> float:
    """Over 1, and never nothing, so that it can divide."""
    return max(tau - 1, 1e-6)


def table(runs: Runs, axis: str) -> Sequence[str]:
    """The fits of one curve in words, a line each."""
    best, other = choose(runs.points(axis))
    lines = []
    for fit in (best, *([other] if other else [])):
        numbers = [f"{n} {v.value:.3f} [{v.low:.3f}, {v.high:.3f}]" for n, v in fit.parameters().items()]
        ahead = "" if fit.ahead is None else f", error ahead {fit.ahead:.3f}"
        lines.append(f"{axis}: {fit.curve.form}: {', '.join(numbers)}; AIC {fit.aic:.1f}{ahead}")
    return [f"{lines[0]} (preferred)", *lines[1:]]
