"""The page of a question that `ablations.py` asked: table, verdict, and what it is worth.

A difference is one if the interval of the ratio of both τ, over held-out conversations in pairs, leaves out 1, and
every seed says the same. With many variants a few such intervals leave out 1 by chance, so a page says how many there
were.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import date
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from tercel.draft.acceptance import acceptance_length
from tercel.files import atomic_file
from tercel.measure.intervals import Interval, ratio_of_totals, speedup, with_interval


@dataclass(frozen=True)
class Measured:
    """A run's last head. Lists are by held-out conversation; right, tried: `[Q][S]`; known_*: of conversations that it
    learned from; overlap, rows: of the first draft at temperature 1, empty sums of a head that has none."""

    seed: int
    tokens: list[int]
    steps: list[int]
    right: list[list[int]]
    tried: list[list[int]]
    overlap: list[float]
    rows: list[int]
    known_tokens: list[int]
    known_steps: list[int]
    seconds: float
    train_tokens: int
    weights: int

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Self:
        return cls(**{field.name: told[field.name] for field in fields(cls)})

    @property
    def tau(self) -> float:
        return acceptance_length(sum(self.tokens), sum(self.steps))


@dataclass(frozen=True)
class Setting:
    """Under what the variants were tried. learned, held_out: conversations; supervised: tokens of the former."""

    command: str
    target: str
    data: str
    base: Mapping[str, Any]
    steps: int
    chain: int
    learned: int
    supervised: int
    held_out: int
    machine: str
    day: str

    @classmethod
    def of(cls, **told: Any) -> Self:
        machine = f"{torch.get_num_threads()} of {platform.machine()}'s threads, torch {torch.__version__}"
        return cls(**told, machine=machine, day=date.today().isoformat())


@dataclass(frozen=True)
class Row:
    """A variant, all of its seeds together. gain: its τ over the base's; agreed: whether every seed says that it is
    more (or less) than the base's of that seed."""

    name: str
    tau: Interval
    by_seed: tuple[float, ...]
    gain: Interval | None
    agreed: bool
    alpha: tuple[Interval, ...]
    at_one: Interval | None
    known: float
    seconds: float
    weights: int

    @property
    def differs(self) -> bool:
        return self.gain is not None and self.agreed and not self.gain.low <= 1 <= self.gain.high

    @classmethod
    def of(cls, name: str, runs: Sequence[Measured], base: Sequence[Measured] | None) -> Self:
        tokens, steps = _summed(run.tokens for run in runs), _summed(run.steps for run in runs)
        gain, agreed = None, False
        if base is not None:
            of_base = _summed(run.tokens for run in base), _summed(run.steps for run in base)
            gain = speedup(tokens, steps, *of_base)
            signs = {np.sign(run.tau - beside.tau) for run, beside in zip(runs, base, strict=True)}
            agreed = len(signs) == 1 and 0 not in signs
        right, tried = np.array([run.right for run in runs]).sum(0), np.array([run.tried for run in runs]).sum(0)
        often = (tried > 0).mean(0) >= 0.5  # else some resample would have none of them
        told = [n for n in (0, 1) if n < len(often) and often[n] and right[:, n].any()]
        overlap, rows = _summed(run.overlap for run in runs), _summed(run.rows for run in runs)
        return cls(
            name=name,
            tau=ratio_of_totals(tokens, steps),
            by_seed=tuple(run.tau for run in runs),
            gain=gain,
            agreed=agreed,
            alpha=tuple(ratio_of_totals(right[:, n], tried[:, n]) for n in told),
            at_one=ratio_of_totals(overlap, rows) if sum(rows) else None,
            known=acceptance_length(_total(run.known_tokens for run in runs), _total(run.known_steps for run in runs)),
            seconds=sum(run.seconds for run in runs) / len(runs),
            weights=runs[0].weights,
        )


def verdict(rows: Sequence[Row]) -> str:
    """Of the variants of a question, without the base."""
    found = [row for row in rows if row.differs and row.gain is not None]
    better = max((row for row in found if row.gain and row.gain.value > 1), key=lambda row: row.tau.value, default=None)
    if better is not None:
        return f"{better.name} gives {with_interval(better.gain)} of the base's τ"
    if found and len(found) == len(rows):
        return "the base is better than all that was tried"
    worse = f"; worse: {', '.join(row.name for row in found)}" if found else ""
    return f"nothing tried is shown to be better{worse}"


def write_page(
    folder: Path,
    question: str,
    told: Setting,
    base: Sequence[Measured],
    measured: Mapping[str, tuple[Mapping[str, Any], Sequence[Measured] | str]],
) -> Path:
    """Write the question's page and the list of all pages. measured: settings of a variant, and its runs or why there
    are none."""
    rows = [Row.of(name, runs, base) for name, (_, runs) in measured.items() if not isinstance(runs, str)]
    failed = {name: runs for name, (_, runs) in measured.items() if isinstance(runs, str)}
    settings = {name: how for name, (how, _) in measured.items()}
    text = page(question, told, base, rows, settings, failed)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{told.day}-{re.sub(r'[^a-z0-9]+', '-', question.lower()).strip('-')}-{told.steps}-steps.md"
    _write(file, text)
    pages = sorted(folder.glob("[0-9]*.md"), reverse=True)
    titles = [f"- [{page.read_text('utf-8').splitlines()[0].removeprefix('# ')}]({page.name})" for page in pages]
    _write(folder / "README.md", "\n".join(["# Experiments", "", "One a page, newest first.", "", *titles, ""]))
    return file


def page(
    question: str,
    told: Setting,
    base: Sequence[Measured],
    rows: Sequence[Row],
    settings: Mapping[str, Mapping[str, Any]],
    failed: Mapping[str, str],
) -> str:
    tokens = _total([run.train_tokens] for run in base) / len(base)
    short = " Short trials say what learns faster, not what ends higher." if told.steps < 400 else ""
    lines = [
        f"# {question} After {told.steps:,} steps {verdict(rows)}",
        "",
        f"{told.day}. `{told.target}`, {told.data}: {told.learned:,} conversations with {told.supervised:,} tokens of "
        f"answers to learn from, {told.held_out:,} held out. {told.steps:,} optimizer steps a run (of the base over "
        f"{tokens:,.0f} tokens, prompts and repeats counted), seeds {', '.join(str(run.seed) for run in base)}. "
        f"{told.machine}.",
        "",
        "```",
        told.command,
        "```",
        "",
        f"The base: {_settings(told.base) or 'all defaults'}.",
        "",
        "| variant | settings | τ | by seed | over the base | 0-α | 1-α | first draft at T = 1 | τ of learned text "
        "| weights | s a run |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
        *(_line(row, settings.get(row.name, {})) for row in (Row.of("base", base, None), *rows)),
        "",
        f"τ and n-α are of greedy chains of {told.chain} drafts on the held-out conversations, with 95 % intervals "
        "over those, in pairs with the base's. A difference counts as one if the interval leaves out 1 and "
        f"every seed agrees; {len(rows)} were looked at, and one in twenty would leave out 1 by chance.{short} First "
        "draft at T = 1: how likely one drawn from the head is accepted, the overlap of its distribution with the "
        "target's. Learned text: as many conversations that the run came to. Seconds include the target's, where its "
        "features are not read from files.",
        *(f"\n{name} could not be tried: {why}" for name, why in failed.items()),
        "",
    ]
    return "\n".join(lines)


def _line(row: Row, settings: Mapping[str, Any]) -> str:
    alpha = [with_interval(value) for value in row.alpha] + ["–"] * (2 - len(row.alpha))
    mark = " **differs**" if row.differs else ""
    cells = [
        row.name,
        _settings(settings),
        with_interval(row.tau),
        ", ".join(f"{tau:.3f}" for tau in row.by_seed),
        with_interval(row.gain, 3) + mark,
        *alpha,
        with_interval(row.at_one, 3),
        f"{row.known:.2f}",
        f"{row.weights / 1e6:.1f} M",
        f"{row.seconds:,.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def _settings(told: Mapping[str, Any]) -> str:
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in told.items()}
    return ", ".join(f"`{name.replace('_', '-')}: {str(value).lower()}`" for name, value in values.items())


def _total(lists: Iterable[Sequence[int]]) -> int:
    return sum(map(sum, lists))


def _summed(lists: Iterable[Sequence[float]]) -> list[float]:
    """By conversation, over seeds."""
    return np.array(list(lists), dtype=np.float64).sum(0).tolist()


def _write(file: Path, text: str) -> None:
    with atomic_file(file) as partial:
        partial.write_text(text, encoding="utf-8")
