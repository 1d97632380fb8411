"""What is learned of drafts that were verified."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tercel.decode.chances import DEPTHS, Chances, expected_calibration_error
from tercel.decode.rising import rising
from tercel.errors import TercelError

QS = np.array([0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99])


def taught(curve, count: int = 20_000, seed: int = 0) -> Chances:
    """After outcomes that fall as `curve` of q has it."""
    rng, chances = np.random.default_rng(seed), Chances()
    q = rng.uniform(0.001, 0.999, count)
    chances.learn(np.log(q), rng.integers(1, DEPTHS + 1, count), rng.uniform(size=count) < curve(q), False)
    return chances


def test_before_anything_is_seen_a_head_is_believed() -> None:
    for depth in (1, 3, 40):
        assert Chances().of(np.log(QS), depth, True) == pytest.approx(QS, abs=0.02)


@pytest.mark.parametrize("curve", [lambda q: q, lambda q: q**2, lambda q: np.sqrt(q), lambda q: 0.2 + 0 * q])
def test_the_map_is_learned(curve) -> None:
    learned = taught(curve).of(np.log(QS), 2, False)
    assert learned == pytest.approx(curve(QS), abs=0.06)
    assert (np.diff(learned) >= 0).all()
    assert taught(curve).of(np.log(QS), 2, True) == pytest.approx(QS, abs=0.02)  # the other regime knows nothing of it


def test_calibration_error_falls() -> None:
    rng = np.random.default_rng(1)
    q = rng.uniform(0.001, 0.999, 5000)
    accepted = rng.uniform(size=5000) < q**3
    before = expected_calibration_error(q, accepted)
    after = expected_calibration_error(taught(lambda q: q**3).of(np.log(q), 1, False), accepted)
    assert before > 0.2
    assert after < 0.03


def test_what_changes_is_learned_anew() -> None:
    chances, one = Chances(), np.full(1000, np.log(0.5))
    for hit, often in ((True, 20), (False, 30)):
        for _ in range(often):
            chances.learn(one, np.ones(1000, int), np.full(1000, hit), False)
    assert chances.of(one[:1], 1, False)[0] < 0.05


def test_nothing_told_is_learned_by_depth_and_place() -> None:
    chances = Chances()
    assert chances.blind(1, 0, True) == 0.5 > chances.blind(1, 1, True)
    for _ in range(100):
        chances.learn_blind(3, 0, True, True)
        chances.learn_blind(3, 1, False, True)
    assert chances.blind(3, 0, True) > 0.9
    assert chances.blind(3, 1, True) < 0.1
    assert chances.blind(2, 0, True) == 0.5


def test_it_is_kept_and_what_is_damaged_is_refused() -> None:
    chances = taught(lambda q: q**2)
    again = Chances.from_json(json.loads(json.dumps(chances.to_json())))
    assert again.of(np.log(QS), 1, False) == pytest.approx(chances.of(np.log(QS), 1, False), abs=1e-3)
    good = chances.to_json()
    for damaged in ({}, {**good, "seen": [1]}, {**good, "hit": [[["x"]]]}, {**good, "seen": (-chances.seen).tolist()}):
        with pytest.raises(TercelError, match="no record of outcomes"):
            Chances.from_json(damaged)


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0.1, 10)), min_size=1, max_size=12))
@settings(deadline=None)
def test_the_nearest_rising_sequence(pairs: list[tuple[float, float]]) -> None:
    values, weights = (np.array(column) for column in zip(*pairs, strict=True))
    fit = rising(values, weights)
    assert (np.diff(fit) >= -1e-12).all()
    assert fit @ weights == pytest.approx(values @ weights)
    for constant in np.unique(fit):  # a pool is its mean, and no other rising sequence is nearer
        pool = fit == constant
        assert values[pool] @ weights[pool] == pytest.approx(constant * weights[pool].sum(), abs=1e-6)
