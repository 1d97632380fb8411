"""How sure a measured number is: 95 % intervals over questions.

Shape legend: Q questions, R bootstrap resamples.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from tercel.errors import TercelError

RESAMPLES = 5000
_CELLS = 1 << 22  # entries of an index block held at a time: bounds the memory of many resamples


@dataclass(frozen=True)
class Interval:
    """A value with its 95 % interval; `low` and `high` are NaN where one question tells nothing of the
    spread."""

    value: float
    low: float
    high: float

    @property
    def ci95(self) -> list[float] | None:
        """`[low, high]`, or None where the interval is unknown: what goes into JSON."""
        return [self.low, self.high] if math.isfinite(self.low) and math.isfinite(self.high) else None


def with_interval(interval: Interval | None, digits: int = 2) -> str:
    """`1.22 [1.10, 1.35]`; without an interval where there is none, or it is a point."""
    if interval is None:
        return "–"
    text = f"{interval.value:.{digits}f}"
    if interval.ci95 is None or interval.low == interval.high:
        return text
    return f"{text} [{interval.low:.{digits}f}, {interval.high:.{digits}f}]"


def ratio_of_totals(
    numerators: Sequence[float], denominators: Sequence[float], *, seed: int = 0, resamples: int = RESAMPLES
) -> Interval:
    """`sum(numerators) / sum(denominators)`, both `[Q]`, with questions resampled in pairs.

    For acceptance length (tokens after the first, steps) and throughput (tokens, seconds).
    Raises `TercelError` for unequal lengths, no question, or a total that is not positive.
    """
    top, bottom = _columns(numerators, denominators)
    return _bootstrap(np.stack([top, bottom]), lambda sums: sums[0] / sums[1], seed, resamples)


def speedup(
    tokens: Sequence[float],
    seconds: Sequence[float],
    base_tokens: Sequence[float],
    base_seconds: Sequence[float],
    *,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Interval:
    """Tokens a second of a method over those of the base, totals over totals, all `[Q]` (spec section 10).

    A resampled question brings its runs of both methods, so that what makes a question slow for both cancels.
    Raises `TercelError` as `ratio_of_totals`.
    """
    columns = np.stack([*_columns(tokens, seconds), *_columns(base_tokens, base_seconds)])
    return _bootstrap(columns, lambda sums: (sums[0] / sums[1]) / (sums[2] / sums[3]), seed, resamples)


def mean_of_ratios(
    numerators: Sequence[float], denominators: Sequence[float], *, seed: int = 0, resamples: int = RESAMPLES
) -> Interval:
    """Mean over questions of `numerator / denominator`, both `[Q]`: every question weighs the same.

    Raises `TercelError` for unequal lengths, no question, or a denominator that is not positive.
    """
    top, bottom = _columns(numerators, denominators)
    if not bool((bottom > 0).all()):
        raise TercelError("a per-question ratio has a denominator of 0; was every question really run?")
    rows = np.stack([top / bottom, np.ones_like(top)])
    return _bootstrap(rows, lambda sums: sums[0] / sums[1], seed, resamples)


def proportion(successes: int, trials: int) -> Interval:
    """Share with Wilson's score interval (E. B. Wilson, 1927).

    Raises `TercelError` unless `0 <= successes <= trials` and there is a trial.
    """
    if trials < 1 or not 0 <= successes <= trials:
        raise TercelError(f"{successes} successes of {trials} trials are not a proportion")
    share, z = successes / trials, NormalDist().inv_cdf(0.975)
    middle = share + z * z / (2 * trials)
    spread = z * math.sqrt(share * (1 - share) / trials + (z / (2 * trials)) ** 2)
    scale = 1 + z * z / trials
    return Interval(share, max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale))


def median(values: Sequence[float]) -> Interval:
    """The median of repeated measurements `[Q]`, with the interval that order statistics give whatever the
    distribution; unknown for fewer than six.

    Raises `TercelError` if there is no value, or one that is not finite.
    """
    ordered = sorted(values)
    if not ordered or not all(map(math.isfinite, ordered)):
        raise TercelError("a median needs finite numbers, and at least one")
    count, middle = len(ordered), statistics.median(ordered)
    outside, tail = 0, 0.0  # values beyond each end of the interval, and how likely the median is beyond it
    while tail + math.comb(count, outside) / 2**count <= 0.025:
        tail += math.comb(count, outside) / 2**count
        outside += 1
    if not outside:
        return Interval(middle, math.nan, math.nan)
    return Interval(middle, ordered[outside - 1], ordered[count - outside])


def _columns(first: Sequence[float], second: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    a, b = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    if a.shape != b.shape or a.ndim != 1 or not len(a):
        raise TercelError(
            f"an interval needs both numbers of at least one question, not {a.shape} and {b.shape} of them"
        )
    if not (np.isfinite(a).all() and np.isfinite(b).all() and b.sum() > 0 and a.sum() > 0):
        raise TercelError("an interval needs finite numbers with positive totals; was anything generated?")
    return a, b


def _bootstrap(
    columns: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray], seed: int, resamples: int
) -> Interval:
    """Expanded percentile interval of `statistic(sums [C] or [C, R])` over columns `[C, Q]`."""
    value = float(statistic(columns.sum(axis=1)))
    count = columns.shape[1]
    rng = np.random.default_rng(seed)
    chunk = max(1, _CELLS // count)
    drawn = []
    for start in range(0, resamples if count > 1 else 0, chunk):
        picks = rng.integers(0, count, (min(chunk, resamples - start), count))
        drawn.append(statistic(columns[:, picks].sum(axis=2)))
    return expanded(value, np.concatenate(drawn) if drawn else np.zeros(0), [count])


def expanded(value: float, drawn: np.ndarray, counts: Sequence[int]) -> Interval:
    """The interval of a value that `drawn` `[R]` are resamples of, of so many questions in every task.

    The plain percentile interval is too short for few questions, by the factor between the normal and
    Student's distribution and `sqrt((Q - 1) / Q)`; the tail area is widened by it (T. Hesterberg, 2015,
    section 5.3). Unknown where a task has a single question, and where a resample in twenty gives no number (nothing
    was tried in it).
    """
    fine = drawn[np.isfinite(drawn)]
    if min(counts) < 2 or len(fine) < 0.95 * len(drawn) or not math.isfinite(value):
        return Interval(value, math.nan, math.nan)
    widened = math.sqrt(min(counts) / (min(counts) - 1)) * _student_quantile(sum(counts) - len(counts))
    tail = NormalDist().cdf(-widened)
    low, high = np.quantile(fine, [tail, 1 - tail])
    return Interval(value, min(float(low), value), max(float(high), value))


def _student_quantile(df: int) -> float:
    """97.5 % point of Student's t: exact for 1 and 2 degrees of freedom, else the Cornish-Fisher series."""
    if df == 1:
        return math.tan(math.pi * 0.475)
    if df == 2:
        return 0.95 * math.sqrt(2 / (1 - 0.95**2))
    z = NormalDist().inv_cdf(0.975)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return sum(term / df**power for power, term in enumerate(terms))
