"""What a benchmark found, in the head's own files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tercel.draft import load_head, save_head
from tercel.errors import TercelError
from tercel.measure.record import record
from tests.draft.heads_for_tests import tiny_draft


def entry(**overrides: Any) -> dict[str, Any]:
    task = {"questions": 5, "tau": 2.345, "tau_ci95": [2.0, 2.6], "speedup": 1.5, "speedup_ci95": [1.4, 1.6]}
    base = {
        "shape": "a chain of 4",
        "dtype": "float32",
        "device": "cpu, 2 threads",
        "temperature": 0.0,
        "max_new_tokens": 64,
        "timestamp": "2026-01-01",
        "tasks": {"gsm8k": task},
    }
    return {**base, **overrides}


def saved(folder: Path) -> Path:
    save_head(tiny_draft(), folder)
    return folder


def test_a_result_stands_on_the_card_and_in_the_files(tmp_path: Path) -> None:
    head = saved(tmp_path / "h")
    weights = (head / "model.safetensors").read_bytes()
    record(load_head(head), entry())
    again = load_head(head)
    assert again.info.measured == {"tau": 2.5, "decoding": [entry()]}
    assert "| gsm8k | 5 | 2.35 | 1.50 [1.40, 1.60] |" in (head / "README.md").read_text()
    assert (head / "model.safetensors").read_bytes() == weights


def test_the_same_measurement_again_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    head = saved(tmp_path / "h")
    for one in (entry(), entry(dtype="bfloat16"), entry(timestamp="2026-02-02")):
        record(load_head(head), one)
    kept = load_head(head).info.measured["decoding"]
    assert [(e["dtype"], e["timestamp"]) for e in kept] == [("bfloat16", "2026-01-01"), ("float32", "2026-02-02")]


def test_prompts_rendered_otherwise_are_another_measurement(tmp_path: Path) -> None:
    head, quiet = saved(tmp_path / "h"), {"enable_thinking": False}
    for one in (entry(), entry(template_arguments=quiet), entry(template_arguments=quiet, timestamp="2026-02-02")):
        record(load_head(head), one)
    kept = load_head(head).info.measured["decoding"]
    found = [(e.get("template_arguments"), e["timestamp"]) for e in kept]
    assert found == [(None, "2026-01-01"), (quiet, "2026-02-02")]


def test_a_head_without_a_record_of_its_own_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(TercelError, match=r"no tercel\.json to record results in"):
        record(tiny_draft(), entry())
