"""Heads of several trainers beside each other (`bench/heads.py`)."""

from __future__ import annotations

import heads
import pytest


def test_heads_are_compared_by_the_mean_of_tasks_and_by_paired_answers() -> None:
    shapes = dict.fromkeys(heads.SHAPES)
    ours = {shape: {"a": [[20, 10], [30, 10]], "b": [[30, 10]]} for shape in shapes}
    theirs = {shape: {"a": [[20, 20], [30, 30]], "b": [[30, 20]]} for shape in shapes}
    assert heads.mean_tau(ours["chain:7"]) == pytest.approx(2.75)
    lines = heads.table({"tercel": {"decode": ours}, "specforge": {"decode": theirs}, "speculators": {}})
    assert "mean τ of the tasks 2.200 x that of specforge; over all answers 2.333" in lines[4]
