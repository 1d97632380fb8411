"""What a run is said to take, beside what it takes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tercel.errors import TercelError
from tercel.measure.expected_tau import BUDGET, DATA, Measured, Runs, expected_tau, predicted, shipped_runs, table
from tercel.measure.forecast import forecast
from tercel.train.config import TrainConfig
from tercel.train.make_features import make_features
from tercel.train.prepare import prepare
from tercel.train.run_folder import RunFolder
from tests.train.test_loop import CHATS, SMALL, outcome_rows, run
from tests.train.worlds import LAYERS, target_of

CONFIG = replace(SMALL, epochs=4, accumulate=1)


def test_a_forecast_counts_what_the_run_then_does(tmp_path: Path) -> None:
    target, out = target_of(), tmp_path / "runs" / "head"
    told = forecast(target, prepare(target, CHATS, CONFIG), CONFIG, out, cached=True, seconds=0.0)
    assert not out.parent.exists()
    features = tmp_path / "features"
    make_features(target, CHATS, LAYERS, features, max_length=CONFIG.max_length)
    run(out, CONFIG, features=features)
    steps = [row for row in outcome_rows(out) if "loss" in row]
    assert told.steps == len(steps)
    assert told.tokens == sum(row["tokens"] for row in steps)
    assert told.evaluations == len([row for row in outcome_rows(out) if "eval" in row])
    used = sum(file.stat().st_size for file in features.rglob("*.safetensors"))
    assert told.features < used < 1.2 * told.features
    kept = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    assert kept < 1.3 * told.run_bytes
    assert told.run_bytes < 6 * kept  # while one is replaced it is there twice
    assert RunFolder(out).state.is_file()


def test_the_weights_stay_and_the_interval_is_about_the_value(tmp_path: Path) -> None:
    target = target_of()
    ready = prepare(target, CHATS, CONFIG)
    before = {name: weights.clone() for name, weights in ready.head.state_dict().items()}
    told = forecast(target, ready, CONFIG, tmp_path, cached=False, seconds=600.0)
    assert all(before[name].equal(weights) for name, weights in ready.head.state_dict().items())
    assert told.calibration.micro_batches == 1 + sum(map(len, ready.plan))  # all of them, the largest twice
    assert told.seconds.low <= told.seconds.value <= told.seconds.high
    assert told.tokens_per_s.value == pytest.approx(told.tokens / told.seconds.value)
    assert 0 < told.calibration.target_share < 1
    assert told.calibration.memory > 50e6
    assert told.features == 0
    written = told.to_json()
    assert json.loads(json.dumps(written)) == written
    assert written["tau_ci95"][0] <= written["tau"] <= written["tau_ci95"][1]


def runs_of(*points: tuple[str, int, int, float]) -> Runs:
    return Runs("t", 2, "2026-01-01", tuple(Measured(axis, own, seen, None, tau) for axis, own, seen, tau in points))


BUDGETS = [(BUDGET, 10**6, 10**5 * 2**i, 1 + 0.2 * 2 ** (0.4 * i)) for i in range(6)]


def test_more_budget_and_more_data_are_expected_to_give_more() -> None:
    data = [(DATA, 10**6 // 2**i, 10**6, 2.2 - 0.2 * i) for i in range(5)]
    both = runs_of(*BUDGETS, *data)
    assert predicted(both, 10**6, 6.4e6).value == pytest.approx(1 + 0.2 * 2 ** (0.4 * 6), rel=0.05)
    assert predicted(both, 10**6, 10**6).value > predicted(both, 10**6, 10**5).value
    few, many = predicted(both, 10**5, 10**6), predicted(both, 10**6, 10**6)
    assert few.value < many.value == pytest.approx(predicted(runs_of(*BUDGETS), 10**6, 10**6).value, rel=0.05)
    assert few.low <= few.value <= few.high
    lines = table(both, BUDGET)
    assert len(lines) == 2
    assert lines[0].startswith("budget: power: scale ")
    assert lines[0].endswith("(preferred)")


def test_what_the_expectation_comes_from_is_told() -> None:
    told = expected_tau(TrainConfig(ttt_steps=5), 10**6, 32e6, runs_of(*BUDGETS)).told
    assert told == (
        "6 runs for t, chains of 2 drafts, of 2026-01-01; this run's chains have 5; "
        "10.0 times as much as the largest of them"
    )
    assert expected_tau(TrainConfig(start_from="head"), 10**6, 1e6).tau is None


def test_the_shipped_runs_can_be_fitted_and_files_of_another_form_are_refused(tmp_path: Path) -> None:
    shipped = shipped_runs()
    assert predicted(shipped, 10**6, 10**6).value > 1.2
    shipped.write(tmp_path / "runs.json", recipe={"lr": 1e-3})
    assert Runs.read(tmp_path / "runs.json") == shipped
    (tmp_path / "runs.json").write_text('{"target": "t", "ttt_steps": 2, "made": "x", "runs": [{"axis": "budget"}]}')
    with pytest.raises(TercelError, match=r"holds no measured runs .*bench/data_curve\.py"):
        Runs.read(tmp_path / "runs.json")
