"""What the paper claims, and the rule by which each claim is judged, both fixed before anything is measured.

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
    """text: what is claimed; paper: what the paper measured; experiment: where it is measured here; statistic: of the
    rates of `quantities`, as that experiment calls them; rule: where its value has to lie."""

    id: str
    text: str
    paper: str
    experiment: str
    statistic: Statistic
    quantities: tuple[str, ...]
    rule: Rule


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
            "paper": self.claim.paper,
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
PARTS = (8, 4, 2, 1)  # of the data: an eighth to all of it
BATCHES = (1, 2, 4, 8, 16, 32, 64)
FLAT = 0.1  # a fall of an acceptance rate over seven inputs of the head's own that counts as none
COLLAPSE = 0.1  # and one from the first to the second that counts as a collapse


def _tau(better: str, worse: str, paper: str, temperature: int = 0, experiment: str = "table1") -> Claim:
    return Claim(
        f"tau-{better}-{worse}-T{temperature}" + ("" if experiment == "table1" else f"-{experiment}"),
        f"τ of {better} is above that of {worse} (T={temperature})",
        paper,
        experiment,
        difference,
        (f"tau/{better}/T{temperature}", f"tau/{worse}/T{temperature}"),
        Rule(low=0.0),
    )


def _faster(better: str, worse: str, paper: str, temperature: int) -> Claim:
    return Claim(
        f"speed-{better}-{worse}-T{temperature}",
        f"{better} is faster than {worse} (T={temperature})",
        paper,
        "table1",
        difference_of_ratios,
        tuple(f"speed/{name}/T{temperature}" for name in (better, worse, "vanilla")),
        Rule(low=0.0),
    )


def _pays(method: str, paper: str, temperature: int) -> Claim:
    return Claim(
        f"speedup-{method}-T{temperature}",
        f"{method} is faster than decoding token by token (T={temperature}): speedup",
        paper,
        "table1",
        ratio,
        (f"speed/{method}/T{temperature}", f"speed/vanilla/T{temperature}"),
        Rule(low=1.0),
    )


def _over_parts(method: str) -> tuple[str, ...]:
    return tuple(f"tau/{method}/1of{part}" for part in PARTS)


CLAIMS: tuple[Claim, ...] = (
    _tau("eagle3", "eagle2", "6.62 and 4.83 (Vicuna 13B, mean of five tasks)"),
    _tau("eagle2", "eagle", "4.83 and 3.96"),
    _tau("eagle", "hydra", "3.96 and 3.50"),
    _tau("hydra", "medusa", "3.50 and 2.51"),
    _tau("eagle3", "sps", "6.62 and 2.24"),
    _tau("eagle3", "pld", "6.62 and 1.80"),
    _tau("eagle3", "lookahead", "6.62 and 1.67"),
    _tau("eagle3", "hass", "EAGLE-3 above HASS"),
    _tau("hass", "eagle2", "HASS above EAGLE-2"),
    _pays("eagle3", "5.51 times", 0),
    _faster("eagle3", "eagle2", "5.51 and 4.22 times", 0),
    _tau("eagle3", "eagle2", "5.67 and 4.41", 1),
    _tau("eagle2", "eagle", "4.41 and 3.45", 1),
    _tau("eagle", "sps", "3.45 and 1.84", 1),
    _pays("eagle3", "4.65 times", 1),
    _tau("eagle3-top-layer", "eagle2", "5.37 and 4.05 on MT-bench: no gain from the feature loss", 0, "table2"),
    _tau("eagle3", "eagle3-top-layer", "6.13 and 5.37 on MT-bench: features of several layers", 0, "table2"),
    Claim(
        "data-slope",
        "τ of eagle3 grows with the data",
        "speedup 4.1 to 4.4 from 1 to 8 times ShareGPT",
        "fig1",
        slope,
        _over_parts("eagle3"),
        Rule(low=0.0),
    ),
    Claim(
        "data-slope-beside",
        "τ of eagle3 grows faster with the data than that of eagle2",
        "speedup 4.1 to 4.4, and 3.2 to 3.4",
        "fig1",
        difference_of_slopes,
        (*_over_parts("eagle3"), *_over_parts("eagle2")),
        Rule(low=0.0),
    ),
    Claim(
        "one-alpha",
        "1-α of eagle3 is above that of EAGLE",
        "0.72 to 0.77, and 0.55 to 0.65",
        "fig4",
        difference,
        ("alpha1/eagle3/T0", "alpha1/eagle/T0"),
        Rule(low=0.0),
    ),
    Claim(
        "collapse",
        "without feature loss and training-time test the head collapses on its own outputs: 0-α less 1-α",
        "1-α falls to 0.25 to 0.35",
        "fig4",
        difference,
        ("alpha0/no-feature-loss/T0", "alpha1/no-feature-loss/T0"),
        Rule(low=COLLAPSE),
    ),
    Claim(
        "collapse-beside",
        "1-α without feature loss and training-time test is below that of EAGLE",
        "0.25 to 0.35, and 0.55 to 0.65",
        "fig4",
        difference,
        ("alpha1/eagle/T0", "alpha1/no-feature-loss/T0"),
        Rule(low=0.0),
    ),
    Claim(
        "flat",
        "n-α of eagle3 stays flat: 0-α less 7-α",
        "0.79 less 0.77",
        "fig7",
        difference,
        ("alpha0/eagle3/T0", "alpha7/eagle3/T0"),
        Rule(high=FLAT),
    ),
    Claim(
        "falls",
        "n-α of EAGLE falls: 0-α less 7-α",
        "0.77 less 0.52",
        "fig7",
        difference,
        ("alpha0/eagle/T0", "alpha7/eagle/T0"),
        Rule(low=FLAT),
    ),
    Claim(
        "seventh",
        "7-α of eagle3 is above that of EAGLE",
        "0.77 and 0.52",
        "fig7",
        difference,
        ("alpha7/eagle3/T0", "alpha7/eagle/T0"),
        Rule(low=0.0),
    ),
    Claim(
        "batches",
        f"eagle3 gains throughput at every batch to {BATCHES[-1]}",
        "1.32 to 1.82 times",
        "table3",
        smallest_ratio,
        (*(f"speed/eagle3/b{b}" for b in BATCHES), *(f"speed/vanilla/b{b}" for b in BATCHES)),
        Rule(low=1.0),
    ),
    Claim(
        "batches-eagle",
        "EAGLE loses throughput at some batch",
        "0.88 times at 48",
        "table3",
        smallest_ratio,
        (*(f"speed/eagle/b{b}" for b in BATCHES), *(f"speed/vanilla/b{b}" for b in BATCHES)),
        Rule(high=1.0),
    ),
    Claim(
        "batch-32",
        "at batch 32 eagle3 has more throughput than EAGLE",
        "1.32 and 0.94 times",
        "table3",
        ratio,
        ("speed/eagle3/b32", "speed/eagle/b32"),
        Rule(low=1.0),
    ),
)


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
