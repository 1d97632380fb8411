"""The fault campaign against a real server of a tiny target: nothing is wrong, nothing is left, it ends in order."""

from __future__ import annotations

import json
from pathlib import Path

import soak
from soak_load import BROKEN, Case, Outcome

from tests.overfit import World


def test_a_server_under_a_mixed_load_answers_ends_and_leaves_nothing(world: World, tmp_path: Path) -> None:
    report = tmp_path / "soak.json"
    load = ["--rounds", "1", "--prompts", "1", "--clients", "12", "--max-new-tokens", "12", "--json", str(report)]
    serve = ["--serve", "--queue", "1", "--tree", "chain:3", "--dtype", "float32", "--backend", "torch"]
    code = soak.main([str(world.folder), str(world.head_folder), *load, *serve])
    found = json.loads(report.read_text("utf-8"))
    assert (code, found["faults"], found["wrong"]) == (0, [], 0)
    assert found["sigterm"]["code"] == 143
    assert found["sigterm"]["streams"].keys() <= {"shutting_down", "length"}
    assert found["taken_port"]["code"] == 2
    assert found["sent"] == found["answered"] + found["refused"] + found["cancelled"]
    assert {"killed", "left", "slow", "malformed", "oversized"} < found["kinds"].keys()
    assert found["kinds"]["killed"]["cancelled"] == 4
    valid = [found["kinds"][kind] for kind in ("short", "streamed", "drawn", "long", "form", "slow", "left", "killed")]
    assert sum(kind["refused"] for kind in valid) > 0  # and told to come again
    assert len(found["rss_mb"]) == 2
    for times in (found, found["without_head"]):
        assert 0 < times["ttft_ms"]["p50"] <= times["ttft_ms"]["p95"]


def test_a_wrong_answer_is_told() -> None:
    """Another text, no text, and a broken request that was let pass."""
    case = Case("short", "/v1/completions", {"prompt": "a"})
    outcomes = [
        Outcome(case, ("b",)),
        Outcome(case, ("c",), refused=2),
        Outcome(case, fault="a stream without its end"),
        Outcome(BROKEN[0], fault="status 200"),
        Outcome(BROKEN[1]),
    ]
    kinds, faults = soak.counted(outcomes, {case.sent: ("b",)})
    assert kinds["short"] == {"sent": 5, "answered": 1, "refused": 2, "cancelled": 0, "wrong": 2}
    assert kinds["malformed"] == {"sent": 2, "answered": 0, "refused": 1, "cancelled": 0, "wrong": 1}
    assert len(faults) == 3
