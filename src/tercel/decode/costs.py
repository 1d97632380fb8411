"""What a step costs on this machine, in milliseconds: a table of what was measured, and what lies between.

`rows` requests, each with a block of `nodes` tokens (all are run as wide as the widest), behind `context` tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from tercel import limits
from tercel.decode.rising import Floats, rising
from tercel.errors import TercelError
from tercel.reading import short

BEYOND = 0.5  # of the average cost of a node: what each node beyond the widest measured block costs at least


@dataclass(frozen=True)
class HeadCosts:
    """What a head costs. keep_up: taking in a step's tokens, and the first level; levels: each below, by its nodes, of
    all rows together."""

    keep_up: float
    levels: Mapping[int, float]


@dataclass(frozen=True)
class StepCosts:
    """forward: of the target, output layer and choice of tokens included, by rows and nodes, behind `context` tokens.
    per_token: what another token of context costs a row, by nodes. head: None for drafts without one. widths: to the
    next of which a block is filled up as it is run; what is wider, or all of them without any, is run as it is.

    Costs never fall with rows, nodes or context: what was measured so is noise and is levelled out.
    Raises `TercelError` for tables that are no costs.
    """

    forward: Mapping[int, Mapping[int, float]]
    context: int = 0
    per_token: Mapping[int, float] = field(default_factory=dict)
    head: HeadCosts | None = None
    widths: Sequence[int] = ()

    def __post_init__(self) -> None:
        tables = [self.forward, *self.forward.values(), self.per_token]
        values = [*self.per_token.values(), *(ms for table in self.forward.values() for ms in table.values())]
        least = [ms > 0 for table in self.forward.values() for ms in table.values()]
        if self.head is not None:
            tables.append(self.head.levels)
            values += [self.head.keep_up, *self.head.levels.values()]
        known = 1 in self.forward and 1 in self.forward[1] and (self.head is None or self.head.levels)
        keys = all(1 <= key <= limits.COUNT for table in (*tables, self.widths) for key in table)
        if not (known and keys and all(least) and all(0 <= ms < math.inf for ms in values) and self.context >= 0):
            raise TercelError(f"costs need finite times, of one row and one node at least, not {short(self)}")

    def forward_ms(self, rows: int, nodes: Floats, context: int) -> Floats:
        """Of blocks of so many `nodes`."""
        near, each = self.near_and_each(rows, nodes)
        return near + max(0, context - self.context) * each

    def near_and_each(self, rows: int, nodes: Floats) -> tuple[Floats, Floats]:
        """The same behind `self.context` tokens, and what each further token of context adds."""
        if self.widths:
            run = np.asarray(self.widths, float)
            place = np.searchsorted(run, nodes)
            nodes = np.where(place < len(run), run[np.minimum(place, len(run) - 1)], nodes)
        most = self._rows[-1]
        if rows > most:  # as a block of as many tokens in the most rows that were measured
            base = self._behind_little(most, nodes * (rows / most))
        else:
            after = int(np.searchsorted(self._rows, rows))
            base = self._behind_little(self._rows[after], nodes)
            if self._rows[after] != rows:
                low, high = self._rows[after - 1], self._rows[after]
                share = (rows - low) / (high - low)
                base = (1 - share) * self._behind_little(low, nodes) + share * base
        return base, rows * _between(*self._per_token, nodes) if self.per_token else np.zeros_like(base)

    def level_ms(self, nodes: float) -> float:
        """Of a head's level of so many nodes; 0 without a head."""
        if self.head is None:
            return 0.0
        if nodes not in self._known_levels:
            self._known_levels[nodes] = float(_between(*self._levels, np.array([nodes]))[0])
        return self._known_levels[nodes]

    @cached_property
    def _rows(self) -> list[int]:
        return sorted(self.forward)

    @cached_property
    def _curves(self) -> dict[int, tuple[Floats, Floats]]:
        """By rows: nodes and costs."""
        return {rows: _rising(self.forward[rows]) for rows in self._rows}

    @cached_property
    def _known_levels(self) -> dict[float, float]:
        return {}

    @cached_property
    def _per_token(self) -> tuple[Floats, Floats]:
        return _rising(self.per_token)

    @cached_property
    def _levels(self) -> tuple[Floats, Floats]:
        assert self.head is not None
        return _rising(self.head.levels)

    def _behind_little(self, rows: int, nodes: Floats) -> Floats:
        """Of measured rows, and no less than fewer of them."""
        measured = [_between(*self._curves[fewer], nodes) for fewer in self._rows if fewer <= rows]
        return measured[0] if len(measured) == 1 else np.max(measured, 0)

    def to_json(self) -> dict[str, Any]:
        head = None if self.head is None else {"keep_up": self.head.keep_up, "levels": _texts(self.head.levels)}
        return {
            "forward": {str(rows): _texts(table) for rows, table in self.forward.items()},
            "context": self.context,
            "per_token": _texts(self.per_token),
            "head": head,
            "widths": list(self.widths),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> StepCosts:
        """Raises `TercelError` for what `to_json` did not write."""
        try:
            head = value["head"]
            return cls(
                {int(rows): _numbers(table) for rows, table in value["forward"].items()},
                int(value["context"]),
                _numbers(value["per_token"]),
                None if head is None else HeadCosts(float(head["keep_up"]), _numbers(head["levels"])),
                tuple(int(width) for width in value["widths"]),
            )
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise TercelError(f"this is no table of costs: {error}; remove the file") from error


def _rising(table: Mapping[int, float]) -> tuple[Floats, Floats]:
    nodes = sorted(table)
    return np.array(nodes, float), rising(np.array([table[n] for n in nodes], float), np.ones(len(nodes)))


def _between(nodes: Floats, ms: Floats, wanted: Floats) -> Floats:
    """Linear between what was measured, and beyond it as steep as at its end, or as `BEYOND` has it."""
    inside = np.interp(wanted, nodes, ms)
    slope = BEYOND * ms[-1] / nodes[-1]
    if len(nodes) > 1:
        slope = max(slope, (ms[-1] - ms[-2]) / (nodes[-1] - nodes[-2]))
    return inside + slope * np.maximum(wanted - nodes[-1], 0)


def _texts(table: Mapping[int, float]) -> dict[str, float]:
    return {str(key): value for key, value in table.items()}


def _numbers(table: Mapping[str, Any]) -> dict[int, float]:
    return {int(key): float(value) for key, value in table.items()}


class LiveCosts:
    """Costs as the running loop finds them: the table's, corrected by the loop's own clock.

    A machine that is slower today is so for every width, which `overall` takes in; what is left is kept by width, at
    powers of two. Each step moves both a little, so that neither a pause nor a wrong table misleads for long.
    """

    INTERRUPTED, IN_A_ROW = math.log(5), 3  # so much too slow was something else, unless it comes again and again
    RATE, MOST = 0.1, 0.4  # of a step's news, in logarithms: how much is believed, and how much of it at once
    WIDTHS = np.log2(1 << np.arange(13)).astype(float)

    def __init__(self, table: StepCosts) -> None:
        self.table = table
        self.overall = 0.0  # logarithms of measured over tabled
        self.by_width = np.zeros(len(self.WIDTHS))
        self.steps = 0
        self._interrupted = 0  # steps in a row
        self._known: dict[int, tuple[Floats, Floats, Floats]] = {}  # by rows
        self._drafting = 0.0  # logarithm, of the head's costs; without a head milliseconds
        self._drafted = 0

    def forward_ms(self, rows: int, most: int, context: int) -> Floats:
        """Of 1 … `most` nodes; never falling."""
        places, tabled = self._tabled(rows, most, context)
        wrong = np.interp(places[:most], self.WIDTHS, self.by_width)
        return np.maximum.accumulate(tabled[:most] * np.exp(self.overall + wrong))

    def _tabled(self, rows: int, most: int, context: int) -> tuple[Floats, Floats]:
        """For 1 … `most` nodes or more: where they lie among the widths, and what the table says."""
        known = self._known.get(rows)
        if known is None or len(known[0]) < most:
            nodes = np.arange(1, most + 1, dtype=float)
            known = self._known[rows] = (np.log2(rows * nodes), *self.table.near_and_each(rows, nodes))
        places, near, each = known
        return places, near + max(0, context - self.table.context) * each

    def saw_forward(self, rows: int, nodes: int, context: int, ms: float) -> None:
        """A step's forward took so long."""
        tabled = float(self._tabled(rows, nodes, context)[1][nodes - 1])
        place = min(math.log2(rows * nodes), self.WIDTHS[-1])
        near = np.maximum(0.0, 1 - np.abs(self.WIDTHS - place))  # the knots on either side
        news = math.log(max(ms, 1e-6) / tabled)
        self._interrupted = self._interrupted + 1 if news - self.overall > self.INTERRUPTED else 0
        if 0 < self._interrupted <= self.IN_A_ROW:
            return  # a graph was compiled, or the machine was busy: no width's own cost
        self.steps += 1
        rate = max(self.RATE, 1 / self.steps)  # the first steps say whether the machine is as it was
        self.overall += rate * self._bounded(news - self.overall - float(near @ self.by_width), self.steps == 1)
        self.by_width += self.RATE * near * self._bounded(news - self.overall - float(near @ self.by_width))

    def draft_ms(self, rows: int, levels: float) -> float:
        """What drafting costs beside the levels below the first, which cost `levels`, together with them."""
        if self.table.head is None:
            return self._drafting
        wider = self.table.level_ms(rows) / max(self.table.level_ms(1), 1e-9)
        return (self.table.head.keep_up * wider + levels) * math.exp(self._drafting)

    def level_ms(self, nodes: int) -> float:
        """A head's next level; of drafts without a head nothing is known before."""
        return self.table.level_ms(nodes) * math.exp(self._drafting)

    def saw_drafting(self, rows: int, levels: float, ms: float) -> None:
        """A draft took so long, whose levels cost `levels` by the table."""
        self._drafted += 1
        rate = max(self.RATE, 1 / self._drafted)
        if self.table.head is None:
            most = ms if self._drafted < 3 else 3 * self._drafting + 0.1
            self._drafting += rate * (min(ms, most) - self._drafting)
        else:
            news = math.log(max(ms, 1e-6) / (self.draft_ms(rows, levels)))
            self._drafting += rate * self._bounded(news)

    def _bounded(self, news: float, all_of_it: bool = False) -> float:
        return news if all_of_it else max(-self.MOST, min(self.MOST, news))
