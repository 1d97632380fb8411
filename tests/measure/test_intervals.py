from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom, t

from tercel.errors import TercelError
from tercel.measure.intervals import (
    Interval,
    _student_quantile,
    mean_of_ratios,
    median,
    proportion,
    ratio_of_totals,
    speedup,
)

positive = st.lists(st.floats(0.1, 100), min_size=1, max_size=30)


def test_speedup_is_total_over_total() -> None:
    # 30 tokens in 3 s against 30 tokens in 9 s
    interval = speedup([10, 20], [1, 2], [10, 20], [4, 5], resamples=500)
    assert interval.value == pytest.approx(3.0)
    # a resample has one question twice, or each once: ratios 4, 2.5 and 3
    assert interval.ci95 == pytest.approx([2.5, 4.0])


def test_questions_stay_paired() -> None:
    """A question ten times as slow for both methods says the same about the speedup: no spread at all."""
    scale = np.array([1.0, 10.0, 3.0, 0.2])
    interval = speedup([8] * 4, scale, [8] * 4, 2.5 * scale)
    assert (interval.value, interval.low, interval.high) == pytest.approx((2.5, 2.5, 2.5))


def test_one_question_has_no_interval() -> None:
    interval = ratio_of_totals([12], [4])
    assert interval.value == 3.0
    assert math.isnan(interval.low)
    assert interval.ci95 is None


@given(positive, st.integers(0, 5))
@settings(max_examples=30, deadline=None)
def test_intervals_hold_the_value_and_repeat(numbers: list[float], seed: int) -> None:
    ones = [1.0] * len(numbers)
    interval = ratio_of_totals(numbers, ones, seed=seed, resamples=200)
    assert interval.value == pytest.approx(np.mean(numbers))
    assert interval == ratio_of_totals(numbers, ones, seed=seed, resamples=200) or interval.ci95 is None
    if interval.ci95 is not None:
        assert min(numbers) - 1e-9 <= interval.low <= interval.value <= interval.high <= max(numbers) + 1e-9


@pytest.mark.parametrize("count", [8, 30])
def test_coverage_of_the_speedup(count: int) -> None:
    """250 benchmarks with a true speedup of 2. At a coverage of 95 % fewer than 225 hits have a probability
    below 1e-3 (binomial); skewed times and few questions may cost two more percent."""
    rng = np.random.default_rng(5)
    hits = 0
    runs = 250
    for _ in range(runs):
        base = rng.lognormal(0.0, 0.5, count)
        own = base / 2 * rng.lognormal(-0.02, 0.2, count)  # mean factor exp(-0.02 + 0.02) = 1
        interval = speedup([1] * count, own, [1] * count, base, resamples=400)
        hits += interval.low <= 2.0 <= interval.high
    least = binom.ppf(1e-3, runs, 0.93)
    assert hits >= least
    assert hits < runs  # an interval that always covers is too long


def test_wilson_against_known_values() -> None:
    interval = proportion(8, 10)  # Newcombe (1998): 0.4902 to 0.9433
    assert (interval.low, interval.high) == pytest.approx((0.4902, 0.9433), abs=2e-4)
    assert proportion(0, 20).low == pytest.approx(0, abs=1e-12)
    assert proportion(20, 20).high == pytest.approx(1)
    assert proportion(20, 20).low > 0.8


def test_mean_of_ratios_weighs_questions_alike() -> None:
    assert mean_of_ratios([1, 300], [1, 100]).value == pytest.approx(2.0)


@pytest.mark.parametrize("df", [1, 2, 3, 5, 20, 100])
def test_student_quantile(df: int) -> None:
    assert _student_quantile(df) == pytest.approx(t.ppf(0.975, df), rel=0.01)


def test_wrong_input_is_refused() -> None:
    with pytest.raises(TercelError, match="at least one question"):
        ratio_of_totals([], [])
    with pytest.raises(TercelError, match="at least one question"):
        ratio_of_totals([1.0], [1.0, 2.0])
    with pytest.raises(TercelError, match="positive totals"):
        ratio_of_totals([1.0], [0.0])
    with pytest.raises(TercelError, match="denominator of 0"):
        mean_of_ratios([1.0, 1.0], [0.0, 1.0])
    with pytest.raises(TercelError, match="not a proportion"):
        proportion(3, 2)
    assert Interval(1.0, 0.5, 2.0).ci95 == [0.5, 2.0]


def test_a_median_lies_between_its_order_statistics() -> None:
    assert median([3, 1, 2, 6, 5, 4]) == Interval(3.5, 1, 6)  # six: the true median is outside once in 32 times
    assert median(range(1, 21)) == Interval(10.5, 6, 15)
    for count in range(6, 60):
        low = int(median(range(count)).low)
        assert 2 * binom.cdf(low, count, 0.5) <= 0.05 < 2 * binom.cdf(low + 1, count, 0.5)
    assert median([7.0, 9.0]).ci95 is None
    for wrong in ([], [1.0, math.nan]):
        with pytest.raises(TercelError, match="finite numbers"):
            median(wrong)
