"""The best setting for somebody's own prompts: successive halving over paired timings, and what to make of them.

Settings are called as `--tree` takes them, decoding without drafts `vanilla`. In each round all that are left answer
the same prompts in turn, and the slower half goes. Whoever is left at last runs once more, beside `vanilla` and `auto`
alone: that round plays no part in the choice, so that what it measures is not the luck that made the choice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tercel.draft.shape import parse_shape
from tercel.errors import TercelError
from tercel.measure.intervals import Interval, ratio_of_totals, speedup
from tercel.measure.summary import VANILLA, QuestionRow

AUTO = "auto"
CHAINS = tuple(f"chain:{depth}" for depth in (3, 2, 4, 1, 5, 6, 8, 7))
TREES = ("4x4x12", "2x2x4", "6x5x24", "3x3x8", "8x6x32", "4x5x16", "10x8x60")
KEPT = (VANILLA, AUTO)  # are never dropped: what the choice is compared with
SEARCH_SHARE = 2 / 3  # of the time; the rest is the last round's
LEAST, LEAST_LAST = 1, 3  # prompts of a round, whatever the time
Ask = Callable[[tuple[str, ...]], QuestionRow]
Clock = Callable[[], float]


def candidates(trees: bool) -> tuple[str, ...]:
    """What is tried beside `KEPT`, what is likeliest to be of use first. trees: whether the target can verify them."""
    if not trees:
        return CHAINS
    ahead, behind = CHAINS[:4], CHAINS[4:]
    return (*ahead, *TREES[:4], *behind, *TREES[4:])


def parse_candidates(text: str) -> tuple[str, ...]:
    """`"chain:2,4x4x12"` to its settings, each once. Raises `TercelError` for one that `--tree` does not take."""
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    for name in names:
        try:
            parse_shape(name)
        except TercelError as error:
            raise TercelError(f"--candidates {name!r}: {error}") from error
    found = tuple(name for name in names if name != AUTO)
    if not found:
        raise TercelError(f"--candidates {text!r} names nothing beside {AUTO}; give for example chain:3,4x4x12")
    return found


def size(name: str) -> int:
    """Nodes of a setting's drafts, root included; 1 where they have none of their own."""
    shape = None if name in KEPT else parse_shape(name)
    return 1 if shape is None else shape.nodes


def affordable(names: Sequence[str], seconds: float, budget: float) -> tuple[str, ...]:
    """The first of `names` that a budget of seconds has time for, one of them at least, where an answer of every
    setting takes `seconds`."""
    many = len(names)
    while many > 1 and seconds * _least_answers(many) > budget:
        many -= 1
    return tuple(names[:many])


def _least_answers(many: int) -> int:
    """How often a setting answers where all rounds are as short as they may be."""
    answers, left = LEAST * (many + len(KEPT)), math.ceil(many / 2)
    while left > 1:
        answers += LEAST * (left + len(KEPT))
        left = math.ceil(left / 2)
    return answers + LEAST_LAST * (1 + len(KEPT))


@dataclass(frozen=True)
class Round:
    """settings that answered, and how; every row has a run of each."""

    settings: tuple[str, ...]
    rows: tuple[QuestionRow, ...]


@dataclass(frozen=True)
class Search:
    """rounds: the last is the one after the choice."""

    rounds: tuple[Round, ...]
    choice: str

    @property
    def last(self) -> Round:
        return self.rounds[-1]

    def rows_of(self, name: str) -> list[QuestionRow]:
        """All that a setting was asked."""
        return merged([row for found in self.rounds if name in found.settings for row in found.rows])


def search(names: Sequence[str], ask: Ask, budget: float, clock: Clock) -> Search:
    """Find the fastest of `names` and `KEPT` but `vanilla`.

    ask: answers the next prompts with each of the settings given. budget: seconds by `clock`, kept as well as single
    answers allow.
    """
    started, left, rounds = clock(), tuple(names), list[Round]()
    many = max(1, math.ceil(math.log2(len(left))))
    for number in range(1, many + 1):
        until = started + budget * SEARCH_SHARE * number / many
        rounds.append(_round((*KEPT, *left), ask, until, clock, LEAST))
        left = _faster_half(left, rounds) if len(left) > 1 else left
    choice = max((AUTO, *left), key=lambda name: _rate(name, rounds))
    last = tuple(dict.fromkeys((*KEPT, choice)))
    rounds.append(_round(last, ask, started + budget, clock, LEAST_LAST))
    return Search(tuple(rounds), choice)


def _round(settings: tuple[str, ...], ask: Ask, until: float, clock: Clock, least: int) -> Round:
    rows: list[QuestionRow] = []
    while len(rows) < least or clock() < until:
        rows.append(ask(settings))
    return Round(settings, tuple(rows))


def _faster_half(names: Sequence[str], rounds: Sequence[Round]) -> tuple[str, ...]:
    """In the order given, so that of equals the likelier one stays."""
    best = sorted(names, key=lambda name: -_rate(name, rounds))[: math.ceil(len(names) / 2)]
    return tuple(name for name in names if name in best)


def _rate(name: str, rounds: Sequence[Round]) -> float:
    """Tokens a second over all that was asked; who is left has answered all of it."""
    rows = [row for found in rounds for row in found.rows]
    return sum(row.tokens(name) for row in rows) / sum(row.seconds(name) for row in rows)


def merged(rows: Sequence[QuestionRow]) -> list[QuestionRow]:
    """Rows of the same question as one: what is resampled is questions."""
    by_id: dict[str, list[QuestionRow]] = {}
    for row in rows:
        by_id.setdefault(row.id, []).append(row)
    return [_joined(same) for same in by_id.values()]


def _joined(rows: Sequence[QuestionRow]) -> QuestionRow:
    names = [name for name in rows[0].runs if all(name in row.runs for row in rows)]
    return QuestionRow(rows[0].id, {name: tuple(run for row in rows for run in row.runs[name]) for name in names})


@dataclass(frozen=True)
class Measured:
    """One setting over all that it was asked. speedup: over `vanilla` on the same prompts."""

    rate: Interval
    speedup: Interval
    tau: float | None
    questions: int

    def to_json(self) -> dict[str, Any]:
        return {
            "tokens_per_s": self.rate.value,
            "tokens_per_s_ci95": self.rate.ci95,
            "speedup": self.speedup.value,
            "speedup_ci95": self.speedup.ci95,
            "tau": self.tau,
            "questions": self.questions,
        }


def measured(name: str, rows: Sequence[QuestionRow]) -> Measured:
    """rows: one a question (`merged`)."""
    steps = sum(row.steps(name) for row in rows)
    return Measured(
        rate=ratio_of_totals([row.tokens(name) for row in rows], [row.seconds(name) for row in rows]),
        speedup=faster(name, VANILLA, rows),
        tau=sum(row.drafted_tokens(name) for row in rows) / steps if steps else None,
        questions=len(rows),
    )


def faster(name: str, base: str, rows: Sequence[QuestionRow]) -> Interval:
    """How many times as many tokens a second as `base`."""
    columns = [[take(row, of) for row in rows] for of in (name, base) for take in (_tokens, _seconds)]
    return speedup(*columns)


def _tokens(row: QuestionRow, name: str) -> float:
    return float(row.tokens(name))


def _seconds(row: QuestionRow, name: str) -> float:
    return row.seconds(name)


@dataclass(frozen=True)
class Verdict:
    """setting: what to use. over_vanilla, over_auto: of the choice, in the last round. sentence: what to do, and why.
    sure: whether more prompts or time would hardly change it."""

    setting: str
    over_vanilla: Interval
    over_auto: Interval
    sentence: str
    sure: bool


def verdict(found: Search) -> Verdict:
    """What a search tells its user."""
    rows = merged(found.last.rows)
    over = {name: faster(name, VANILLA, rows) for name in found.last.settings if name != VANILLA}
    choice, over_auto = found.choice, faster(found.choice, AUTO, rows)
    setting, sentence, sure = _advice(choice, over, over_auto)
    return Verdict(setting, over[choice], over_auto, sentence, sure)


def _advice(choice: str, over: Mapping[str, Interval], over_auto: Interval) -> tuple[str, str, bool]:
    gain, of_auto = over[choice], over[AUTO]
    if gain.ci95 is None:
        return (
            VANILLA if gain.value <= 1 else choice,
            f"{as_flags(choice)} was {told(gain)} times as fast as without drafts on the only prompt: give more of "
            "them, or nothing is known of others",
            False,
        )
    times = f"{told(gain)} times as fast as without drafts"
    if gain.high < 1:
        return VANILLA, f"do not speculate: the best setting tried, {as_flags(choice)}, is {times}", True
    if gain.low > 1 and (choice == AUTO or over_auto.low > 1):
        more = "" if choice == AUTO else f", and {told(over_auto)} times as fast as with auto"
        nothing = "; no setting is surely better" if choice == AUTO else ""
        return choice, f"use {as_flags(choice)}: {times}{more}{nothing}", True
    if of_auto.low > 1:
        return (
            AUTO,
            f"use {as_flags(AUTO)}: {told(of_auto)} times as fast as without drafts; no setting is surely better "
            f"(the best tried, {as_flags(choice)}, is {told(over_auto)} times as fast as auto)",
            True,
        )
    if gain.low > 1:
        return choice, f"use {as_flags(choice)}: {times}", True
    return (
        VANILLA,
        f"do not speculate: the best setting tried, {as_flags(choice)}, is {times}, which is no sure gain; more "
        "prompts or --minutes may tell",
        False,
    )


def as_flags(setting: str) -> str:
    """What asks a verb for a setting."""
    return "--draft none" if setting == VANILLA else f"--tree {setting}"


def told(interval: Interval) -> str:
    """`1.31 [1.22, 1.40]`."""
    if interval.ci95 is None:
        return f"{interval.value:.2f}"
    return f"{interval.value:.2f} [{interval.low:.2f}, {interval.high:.2f}]"
