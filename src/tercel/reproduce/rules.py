"""The rule by which a claim is judged, fixed before anything is measured.

A claim is a number made of measured rates (a difference of two methods, a slope, …) and where it has to lie. Its 95 %
interval decides: wholly there, the claim is reproduced; wholly elsewhere, it is not; else, or where nothing was
measured, it is undecided. Differences are paired: of the same questions, resampled together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from tercel.measure.intervals import Interval
from tercel.measure.samples import (
    Samples,
    Statistic,
    difference,
    difference_of_ratios,
    difference_of_slopes,
    ratio,
    slope,
    smallest_ratio,
)

Verdict = Literal["reproduced", "not reproduced", "undecided"]
REPRODUCED: Final = "reproduced"
NOT_REPRODUCED: Final = "not reproduced"
UNDECIDED: Final = "undecided"


@dataclass(frozen=True)
class Rule:
    """Where a number has to lie: above `low`, at most `high`."""

    low: float = -math.inf
    high: float = math.inf

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"above {self.low:g}"
        if self.low == -math.inf:
            return f"at most {self.high:g}"
        return f"above {self.low:g} and at most {self.high:g}"

    def verdict(self, interval: Interval | None) -> Verdict:
        """Reproduced if both ends of the interval are there, not reproduced if both are on one side outside."""
        if interval is None or interval.ci95 is None:
            return UNDECIDED
        if interval.low > self.low and interval.high <= self.high:
            return REPRODUCED
        if interval.high <= self.low or interval.low > self.high:
            return NOT_REPRODUCED
        return UNDECIDED


@dataclass(frozen=True)
class Claim:
    """text: what is claimed; paper: what was published of it; experiment: where it is measured here; statistic: of the
    rates of `quantities`, as that experiment calls them; rule: where its value has to lie; source: whose claim it is,
    where it is not the EAGLE-3 paper's."""

    id: str
    text: str
    paper: str
    experiment: str
    statistic: Statistic
    quantities: tuple[str, ...]
    rule: Rule
    source: str | None = None

    @property
    def published(self) -> str:
        return self.paper if self.source is None else f"{self.source}: {self.paper}"


@dataclass(frozen=True)
class Judged:
    """A claim with what was measured; why: a word on a verdict that is undecided for want of data."""

    claim: Claim
    interval: Interval | None
    verdict: Verdict
    command: str
    why: str = ""

    @property
    def rule(self) -> str:
        return f"{STATISTICS[self.claim.statistic]} {self.claim.rule}"

    def to_json(self) -> dict[str, Any]:
        return {
            "claim": self.claim.text,
            "paper": self.claim.published,
            "measured": None if self.interval is None else self.interval.value,
            "ci95": None if self.interval is None else self.interval.ci95,
            "verdict": self.verdict,
            "command": self.command,
            "id": self.claim.id,
            "rule": self.rule,
            "why": self.why,
        }


STATISTICS: dict[Statistic, str] = {
    difference: "the difference is",
    difference_of_ratios: "the difference in speedup is",
    ratio: "the ratio is",
    slope: "the slope for each doubling is",
    difference_of_slopes: "the difference of the slopes for each doubling is",
    smallest_ratio: "the smallest ratio is",
}


def judge(
    claim: Claim, found: Mapping[str, Samples], command: str, absent: Mapping[str, str] | None = None
) -> Judged:
    """The verdict on a claim by what its experiment measured. found: by experiment; absent: why a method was left
    out."""
    samples = found.get(claim.experiment)
    if samples is None:
        return Judged(claim, None, UNDECIDED, command, f"{claim.experiment} was not run")
    whose = (_measured_name(name, absent or {}) for name in claim.quantities if name not in samples.columns)
    if missing := dict.fromkeys(whose):
        told = (f"{name}: {(absent or {}).get(name, 'not measured')}" for name in missing)
        return Judged(claim, None, UNDECIDED, command, "; ".join(told))
    interval = samples.interval(claim.statistic, claim.quantities)
    if interval is not None and not math.isfinite(interval.value):
        return Judged(claim, None, UNDECIDED, command, "too few chains came that far")
    return Judged(claim, interval, claim.rule.verdict(interval), command)


def _measured_name(quantity: str, absent: Mapping[str, str]) -> str:
    """Of `tau/eagle3/1of8` the variant, where that was left out, else the method."""
    variant = quantity.partition("/")[2]
    return variant if variant in absent else variant.partition("/")[0]
