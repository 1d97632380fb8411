"""The script that measures and fits τ against data, on tiny runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from data_curve import Series, Sizes, report, run_all

from tercel.draft import load_head
from tercel.measure.expected_tau import BUDGET, DATA, Runs
from tests.train.test_loop import CHATS, SMALL
from tests.train.worlds import target_of


def test_runs_are_made_measured_predicted_and_fitted(tmp_path: Path) -> None:
    config = replace(SMALL, accumulate=1, eval_every=10**6)
    series = Series(target_of(), CHATS, config, tmp_path, None)
    sizes = Sizes(parts=[1, 2], steps=3, budgets=[4, 1, 2, 3])
    runs = run_all(series, sizes)
    assert [(run.axis, run.steps) for run in runs.runs] == [
        *[(DATA, 3), (DATA, 3)],
        *[(BUDGET, 1), (BUDGET, 2), (BUDGET, 3), (BUDGET, 4)],
    ]
    half, whole, *budgets = runs.runs
    assert half.supervised < whole.supervised
    assert [run.seen for run in budgets] == sorted(run.seen for run in budgets)
    assert budgets[2].tau == whole.tau  # the very same run
    rows = [json.loads(line) for line in (tmp_path / "part-1-steps-4/training/metrics.jsonl").read_text().splitlines()]
    share = whole.supervised / load_head(tmp_path / "part-1-steps-4").info.training.tokens
    assert budgets[3].seen == round(share * sum(row.get("tokens", 0) for row in rows))
    assert Runs.read(tmp_path / "runs.json") == runs
    told = json.loads((tmp_path / "predicted-budget.json").read_text("utf-8"))
    assert set(told["forms"]) >= {told["preferred"]}
    lines = report(tmp_path)
    assert sum(line.startswith("budget: written on ") for line in lines) == 1
    assert any("without its largest run" in line for line in lines)
    before = (tmp_path / "predicted-budget.json").read_text("utf-8")
    assert run_all(series, sizes).runs == runs.runs  # nothing is made twice
    assert (tmp_path / "predicted-budget.json").read_text("utf-8") == before
