"""The engines' proof: how it judges a run, and the report that stands in the documentation."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import prove
import pytest

ROOT = Path(__file__).parent.parent
REPORT = ROOT / "docs" / "engines.json"
ARGS = Namespace(tasks="demo:2", max_new_tokens=4, k=2, threads=1)


def run(**changes: Any) -> dict[str, Any]:
    base = {"version": "1", "answers": [[1, 2, 3], [4, 5]], "seconds": [2.0, 1.0], "drafts": 40, "accepted": [20, 10]}
    return {**base, **changes}


def judged(**drafted: Any) -> dict[str, Any]:
    reference = prove.Reference([[9], [8]], [0], [[1, 2, 3], [4, 5, 0]], 40, [20, 10])
    return prove.entry("vllm", reference, run(), run(**drafted), run(), run(seconds=[1.0, 0.5]), ARGS)


def test_the_token_that_ends_an_answer_may_be_left_out_and_no_other() -> None:
    assert judged()["same_text"]
    assert judged(answers=[[1, 2, 3], [4, 5, 0]])["same_text"]
    assert not judged(answers=[[1, 2, 3], [4]])["same_text"]
    assert not judged(answers=[[1, 2, 7], [4, 5, 0]])["same_text"]


def test_acceptance_must_be_within_the_interval_at_every_position() -> None:
    assert judged()["same_acceptance"]
    assert judged(accepted=[21, 10])["same_acceptance"]
    for wrong in ([20, 1], [4, 1], [39, 10]):
        assert not judged(accepted=wrong)["same_acceptance"], wrong


def test_speedup_is_that_of_the_engine_itself() -> None:
    found = judged()
    assert found["speedup_there"] == pytest.approx(2.0)
    assert found["tokens_per_s"]["bfloat16"] == pytest.approx([5 / 3, 10 / 3])


def test_the_report_in_the_documentation_is_whole_and_good() -> None:
    report = json.loads(REPORT.read_text(encoding="utf-8"))
    assert {"vllm", "speculators", "openvino", "llamacpp"} <= report.keys()
    for engine, entry in report.items():
        assert entry["loads"], engine
        assert entry["same_text"], engine
        assert entry["same_acceptance"], engine
        assert len(entry["acceptance_engine"]) == len(entry["acceptance_tercel"]) == 4
        assert entry["speedup_there"] > 0
        for key in ("version", "date", "command"):
            assert entry[key], (engine, key)
