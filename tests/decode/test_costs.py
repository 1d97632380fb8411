"""The table of costs: what lies between, what is kept, and what the loop's clock puts right."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tercel.decode import calibrate
from tercel.decode.calibrate import measure_costs, step_costs
from tercel.decode.costs import HeadCosts, LiveCosts, StepCosts
from tercel.decode.eagle3 import Eagle3
from tercel.decode.stopwatch import Patience
from tercel.decode.vanilla import Vanilla
from tercel.errors import TercelError
from tests.decode.drafts import random_draft, tiny_target

TABLE = StepCosts(
    {1: {1: 20.0, 8: 24.0, 64: 60.0}, 4: {1: 22.0, 8: 40.0}},
    64,
    {1: 0.001, 64: 0.002},
    HeadCosts(2.0, {1: 1.0, 8: 1.5}),
)

tables = st.dictionaries(st.integers(1, 64), st.floats(0.1, 1e3), min_size=1).map(lambda table: {1: 5.0, **table})


@given(tables, tables, st.integers(1, 70), st.integers(0, 5000))
@settings(max_examples=60, deadline=None)
def test_costs_never_fall(one: dict[int, float], four: dict[int, float], rows: int, context: int) -> None:
    costs = StepCosts({1: one, 4: four}, 64, {1: 0.01, 32: 0.02}, HeadCosts(1.0, one))
    nodes = np.arange(1.0, 100.0)
    curve = costs.forward_ms(rows, nodes, context)
    assert (np.diff(curve) >= -1e-9).all()
    assert (costs.forward_ms(rows + 1, nodes, context) >= curve - 1e-6).all()
    assert (costs.forward_ms(rows, nodes, context + 100) >= curve - 1e-9).all()
    levels = [costs.level_ms(n) for n in nodes]
    assert levels == sorted(levels)


def test_what_was_measured_is_what_is_told() -> None:
    assert TABLE.forward_ms(1, np.array([1.0, 8.0, 64.0]), 64).tolist() == [20.0, 24.0, 60.0]
    assert TABLE.forward_ms(1, np.array([4.5]), 64)[0] == pytest.approx(22.0)
    assert TABLE.forward_ms(4, np.array([1.0]), 64)[0] == 22.0
    assert TABLE.forward_ms(1, np.array([1.0]), 1064)[0] == pytest.approx(21.0)
    assert TABLE.forward_ms(4, np.array([1.0]), 1064)[0] == pytest.approx(26.0)  # four rows have four contexts
    assert TABLE.forward_ms(16, np.array([2.0]), 64)[0] == TABLE.forward_ms(4, np.array([8.0]), 64)[0]
    assert StepCosts.from_json(json.loads(json.dumps(TABLE.to_json()))) == TABLE


def test_what_is_no_table_is_refused() -> None:
    for forward in ({}, {2: {1: 1.0}}, {1: {2: 1.0}}, {1: {1: 0.0}}, {1: {1: float("nan")}}, {1: {0: 1.0, 1: 1.0}}):
        with pytest.raises(TercelError, match="costs need"):
            StepCosts(forward)
    for value in ({}, {"forward": 3, "context": 0, "per_token": {}, "head": None}, {**TABLE.to_json(), "head": {}}):
        with pytest.raises(TercelError, match="no table of costs"):
            StepCosts.from_json(value)


def test_the_loops_clock_puts_a_wrong_table_right() -> None:
    live = LiveCosts(TABLE)
    rng = np.random.default_rng(0)
    for number in range(400):
        nodes = int(rng.choice([1, 8, 32]))
        truth = 2 * float(TABLE.forward_ms(1, np.array([float(nodes)]), 64)[0]) * (1.5 if nodes == 32 else 1.0)
        live.saw_forward(1, nodes, 64, 100 * truth if number % 50 == 7 else truth * rng.uniform(0.95, 1.05))  # pauses
    curve = live.forward_ms(1, 64, 64)
    assert curve[0] == pytest.approx(40.0, rel=0.15)
    assert curve[7] == pytest.approx(48.0, rel=0.15)
    assert curve[31] == pytest.approx(3 * TABLE.forward_ms(1, np.array([32.0]), 64)[0], rel=0.2)
    for _ in range(100):
        live.saw_drafting(1, 2.0, 8.0)
    assert live.draft_ms(1, 2.0) == pytest.approx(8.0, rel=0.05)


def test_a_target_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(calibrate, "PATIENCE", Patience(0.0, least=1, most=1))
    measured: list[StepCosts] = []

    def measure(*args, **kwargs) -> tuple[StepCosts, float]:
        measured.append(measure_costs(*args, **kwargs)[0])
        return measured[-1], steadiness

    monkeypatch.setattr(calibrate, "measure_costs", measure)
    target = tiny_target("llama")
    proposer = Eagle3(random_draft(target), target)
    steadiness = 0.1
    step_costs(target, proposer)
    assert not list((tmp_path / "costs").iterdir())  # of a busy machine nothing is kept
    steadiness = 0.9
    costs = step_costs(target, proposer)
    assert costs.head is not None
    assert step_costs(target, proposer) == costs
    assert len(measured) == 2
    (file,) = (tmp_path / "costs").iterdir()
    for damaged in ("", "{", '{"key": 1}', file.read_text().replace('"1"', '"x"', 1)):
        file.write_text(damaged)
        assert step_costs(target, proposer) == measured[-1]
    assert len(measured) == 6
    assert step_costs(target, Vanilla()).head is None  # without a head it is another table
    assert len(measured) == 7
    assert set(step_costs(target, proposer, slots=3).forward) == {1, 3}


def test_a_step_that_was_interrupted_says_nothing_of_its_width() -> None:
    live = LiveCosts(StepCosts({1: {1: 10.0, 8: 14.0, 32: 28.0}}))
    before = live.forward_ms(1, 32, 0)
    for width, ms in ((8, 1100.0), (1, 10.0), (8, 14.0), (1, 1000.0), (1, 900.0), (8, 14.0)):
        live.saw_forward(1, width, 0, ms)
    np.testing.assert_allclose(live.forward_ms(1, 32, 0), before)
    for _ in range(80):  # but a machine that is that slow is learned
        live.saw_forward(1, 8, 0, 140.0)
    assert live.forward_ms(1, 8, 0)[-1] > 100
