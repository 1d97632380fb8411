from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from tercel.errors import TercelError
from tercel.measure.goodness import (
    chi_square,
    chi_square_tail,
    chi_square_uniform,
    combine,
    ks_uniform,
    normal_tails,
    randomised_pit,
)


@pytest.mark.parametrize(("statistic", "df"), [(0.0, 3), (3.84, 1), (30.0, 12), (400.0, 300)])
def test_chi_square_tail(statistic: float, df: int) -> None:
    assert chi_square_tail(statistic, df) == pytest.approx(stats.chi2.sf(statistic, df), rel=1e-6)


def test_normal_tails() -> None:
    assert normal_tails(-1.959964) == pytest.approx(0.05, abs=1e-6)


@pytest.mark.parametrize("power", [1.0, 1.1, 1.3])
def test_ks_agrees_with_scipy(power: float) -> None:
    values = np.random.default_rng(0).random(500) ** power
    assert ks_uniform(values) == pytest.approx(stats.kstest(values, "uniform").pvalue, abs=0.01)


def test_nothing_to_test_is_refused() -> None:
    with pytest.raises(TercelError, match="nothing to test"):
        ks_uniform([])


@given(st.lists(st.integers(0, 40), min_size=1, max_size=30), st.integers(0, 2**32))
def test_pooling_keeps_counts_and_leaves_no_small_cell(weights: list[int], seed: int) -> None:
    total = sum(weights)
    if not total:
        return
    expected = np.array(weights, dtype=float)
    observed = np.random.default_rng(seed).multinomial(total, expected / total).astype(float)
    statistic, df = chi_square(observed, expected)
    assert statistic >= 0
    assert df <= max(0, sum(w >= 5 for w in weights))  # one cell for all small ones, less one for the total
    if df:
        assert total >= 10


def test_chi_square_without_pooling_is_pearsons() -> None:
    observed, expected = np.array([12.0, 18.0, 30.0]), np.array([20.0, 20.0, 20.0])
    assert chi_square(observed, expected) == (pytest.approx(stats.chisquare(observed, expected).statistic), 2)


def test_pit_goes_from_the_most_probable_token_and_breaks_ties_by_id() -> None:
    probs = np.array([0.2, 0.5, 0.2, 0.1])
    assert randomised_pit(probs, 1, 0.0) == 0.0
    assert randomised_pit(probs, 0, 0.0) == pytest.approx(0.5)
    assert randomised_pit(probs, 2, 0.0) == pytest.approx(0.7)
    assert randomised_pit(probs, 3, 0.5) == pytest.approx(0.95)


def test_pit_of_a_right_sampler_is_uniform_at_the_stated_rate() -> None:
    """200 tests of 150 tokens with ever new distributions: at 5 % about 10 are rejected; more than 21 would
    have a probability below 1e-3."""
    rng = np.random.default_rng(1)
    rejected = {"ks": 0, "chi": 0}
    for _ in range(200):
        values = []
        for _ in range(150):
            probs = rng.dirichlet(np.full(12, 0.4))
            values.append(randomised_pit(probs, int(rng.choice(12, p=probs)), rng.random()))
        rejected["ks"] += ks_uniform(values) < 0.05
        rejected["chi"] += chi_square_uniform(values) < 0.05
    assert max(rejected.values()) <= stats.binom.ppf(0.999, 200, 0.05)
    assert min(rejected.values()) > 0  # tests that never reject would be none


def test_pit_sees_a_sampler_that_prefers_the_probable() -> None:
    rng = np.random.default_rng(2)
    values = []
    for _ in range(600):
        probs = rng.dirichlet(np.full(50, 0.3))
        sharper = probs**1.3 / (probs**1.3).sum()
        values.append(randomised_pit(probs, int(rng.choice(50, p=sharper)), rng.random()))
    assert ks_uniform(values) < 1e-3


def test_combined_p_value() -> None:
    assert combine({"a": 0.01, "b": 0.5, "c": 0.9}) == pytest.approx(0.03)
    assert combine({"a": 0.9}) == 0.9
    assert combine({"a": 0.6, "b": 0.7}) == 1.0
