"""Fits of τ against tokens: planted curves are found again, with intervals that hold them, and points ahead told."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tercel.errors import TercelError
from tercel.measure.scaling import POWER, SATURATING, Point, choose, fit

TOKENS = [2e4 * 2**i for i in range(8)]


def power(tokens: float) -> float:
    return 1 + 0.14 * (tokens / 2e4) ** 0.4


def saturating(tokens: float) -> float:
    return 2.6 - 1.4 * (tokens / 2e4) ** -0.45


def measured(curve, spread: float = 0.0, seed: int = 0, tokens=TOKENS) -> list[Point]:
    noise = np.random.default_rng(seed).normal(0, spread, len(tokens)) if spread else np.zeros(len(tokens))
    return [Point(t, curve(t) + float(e)) for t, e in zip(tokens, noise, strict=True)]


@pytest.mark.parametrize(("curve", "form"), [(power, POWER), (saturating, SATURATING)])
def test_a_planted_curve_is_found_again_and_preferred(curve, form):
    best, other = choose(measured(curve))
    assert best.curve.form == form
    assert other is not None
    assert best.aic < other.aic
    for tokens in (*TOKENS, 4 * TOKENS[-1]):
        assert best.curve.at(tokens) == pytest.approx(curve(tokens), abs=0.005)
    if form == SATURATING:
        assert best.curve.limit == pytest.approx(2.6, abs=0.02)


def test_the_scale_of_tokens_does_not_matter():
    thousand = [Point(p.tokens * 1000, p.tau) for p in measured(saturating, 0.01)]
    one, other = fit(measured(saturating, 0.01), SATURATING), fit(thousand, SATURATING)
    assert other.predict(1e9).value == pytest.approx(one.predict(1e6).value, rel=1e-6)


@pytest.mark.parametrize(("curve", "form"), [(power, POWER), (saturating, SATURATING)])
def test_intervals_hold_the_point_to_come_about_as_often_as_they_say(curve, form):
    """In 40 worlds."""
    hits, widths = 0, []
    for seed in range(40):
        points = measured(curve, 0.02, seed, [*TOKENS, 2 * TOKENS[-1]])
        told = fit(points[:-1], form, resamples=100, seed=seed).predict(points[-1].tokens)
        hits += told.low <= points[-1].tau <= told.high
        widths.append(told.high - told.low)
    assert hits >= 34
    assert 0.04 < float(np.median(widths)) < 0.6


def test_parameters_have_intervals():
    told = fit(measured(saturating, 0.01), SATURATING).parameters()
    assert set(told) == {"scale", "exponent", "limit"}
    for value in told.values():
        assert value.low < value.value < value.high
    assert told["limit"].low < 2.6 < told["limit"].high


def test_few_points_choose_the_power_law_and_tell_no_error_ahead():
    best, other = choose(measured(saturating)[:3])
    assert (best.curve.form, other) == (POWER, None)
    best, other = choose(measured(saturating)[:4])
    assert best.curve.form == POWER
    assert best.ahead is None
    assert best.predict(1e6).ci95 is not None
    assert fit(measured(power)[:2], POWER).predict(1e6).ci95 is None


def test_predictions_are_never_below_one_and_never_nan():
    falling = [Point(t, 1.5 - 0.05 * i) for i, t in enumerate(TOKENS)]
    for form in (POWER, SATURATING):
        told = fit(falling, form).predict(1.0)
        assert 1.0 <= told.low <= told.value <= told.high < math.inf


@pytest.mark.parametrize(
    ("points", "words"),
    [
        ([Point(1, 1.1), Point(1, 1.2)], "too few for the power form, which has 2 numbers"),
        ([Point(0, 1.1), Point(1, 1.2)], "tokens are positive"),
        ([Point(1, 0.5), Point(2, 1.2)], "τ at least 1"),
        ([Point(1, math.nan), Point(2, 1.2)], "τ at least 1"),
    ],
)
def test_what_cannot_be_fitted(points, words):
    with pytest.raises(TercelError, match=words):
        fit(points, POWER)
