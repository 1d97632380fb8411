"""What a benchmark found, in the head's own files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tercel.decode.sampling import SamplingParams
from tercel.draft import TrainingRecord, load_head, save_head
from tercel.draft.history import DecodingRecord
from tercel.errors import TercelError
from tercel.locks import folder_lock
from tercel.measure import record as record_module
from tercel.measure.intervals import Interval
from tercel.measure.record import decoding_entry, record, require_recordable
from tercel.measure.summary import BenchReport, MethodSummary, TaskResult
from tests.draft.heads_for_tests import tiny_draft


def entry(**overrides: Any) -> DecodingRecord:
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
    return DecodingRecord.from_json({**base, **overrides}, "entry", Path("here"))


def saved(folder: Path) -> Path:
    save_head(tiny_draft(), folder)
    return folder


def test_a_result_stands_on_the_card_and_in_the_files(tmp_path: Path) -> None:
    head = saved(tmp_path / "h")
    weights = (head / "model.safetensors").read_bytes()
    record(load_head(head), entry())
    again = load_head(head)
    assert again.info.measured.to_json() == {"tau": 2.5, "decoding": [entry().to_json()]}
    assert "| gsm8k | 5 | 2.35 | 1.50 [1.40, 1.60] |" in (head / "README.md").read_text()
    assert (head / "model.safetensors").read_bytes() == weights


def test_the_same_measurement_again_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    head = saved(tmp_path / "h")
    for one in (entry(), entry(dtype="bfloat16"), entry(timestamp="2026-02-02")):
        record(load_head(head), one)
    kept = load_head(head).info.measured.decoding
    assert [(e.dtype, e.timestamp) for e in kept] == [("bfloat16", "2026-01-01"), ("float32", "2026-02-02")]


def test_prompts_rendered_otherwise_are_another_measurement(tmp_path: Path) -> None:
    head, quiet = saved(tmp_path / "h"), {"enable_thinking": False}
    for one in (entry(), entry(template_arguments=quiet), entry(template_arguments=quiet, timestamp="2026-02-02")):
        record(load_head(head), one)
    kept = load_head(head).info.measured.decoding
    found = [(e.template_arguments, e.timestamp) for e in kept]
    assert found == [(None, "2026-01-01"), (quiet, "2026-02-02")]


def test_a_head_without_a_record_of_its_own_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(TercelError, match=r"no tercel\.json to record results in"):
        record(tiny_draft(), entry())


@pytest.mark.parametrize("known", [True, False])
def test_one_question_gives_no_interval_and_is_recorded_without(tmp_path: Path, known: bool) -> None:
    head = saved(tmp_path / "h")
    task = {"questions": 1, "tau": 2.0 if known else None, "tau_ci95": None, "speedup": 1.5, "speedup_ci95": None}
    record(load_head(head), entry(tasks={"gsm8k": task}))
    assert load_head(head).info.measured.decoding == (entry(tasks={"gsm8k": task}),)
    assert f"| gsm8k | 1 | {'2.00' if known else '–'} | 1.50 |" in (head / "README.md").read_text()
    record(load_head(head), entry(dtype="bfloat16"))  # and what is there can be written again


def test_the_entry_of_a_benchmark_with_one_question() -> None:
    unknown = Interval(1.5, float("nan"), float("nan"))
    summary = MethodSummary(4, 1.0, unknown, None, unknown, unknown, None, None, 1)
    tasks = (TaskResult("demo", {"eagle3": summary}, ()),)
    report = BenchReport("t", "h", "float32", "cpu", 2, tasks, {}, SamplingParams(), 1, {}, "now")
    assert decoding_entry(report, "a chain of 4").tasks["demo"].to_json() == {
        "questions": 1,
        "tau": None,
        "tau_ci95": None,
        "speedup": 1.5,
        "speedup_ci95": None,
    }
    without = replace(report, tasks=(TaskResult("demo", {}, ()),))
    with pytest.raises(TercelError, match="demo was not answered with eagle3"):
        decoding_entry(without, "a chain of 4")


def test_an_edited_card_keeps_its_words(tmp_path: Path) -> None:
    head = saved(tmp_path / "h")
    card = "# Ours\n\n## Measured\nlong ago\n\n## Thanks\nto all\n"
    (head / "README.md").write_text(card)
    for result in (entry(), entry(dtype="bfloat16")):
        record(load_head(head), result)
    text = (head / "README.md").read_text()
    assert text.startswith("# Ours\n\n## Measured\n")
    assert text.endswith("\n\n## Thanks\nto all\n")
    assert "long ago" not in text
    assert text.count("| gsm8k | 5 | 2.35 | 1.50 [1.40, 1.60] |") == 2
    (head / "README.md").write_text("# Ours\n")
    record(load_head(head), entry())
    assert (head / "README.md").read_text().startswith("# Ours\n\n## Measured\n")
    save_head(tiny_draft(), head, card="# Another\n")
    assert (head / "README.md").read_text().startswith("# Ours\n")  # still somebody's own


def test_a_result_that_cannot_be_written_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = saved(tmp_path / "h")
    model, before = load_head(head), {p.name: p.read_bytes() for p in head.iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(record_module, "head_card", raises(ValueError("no card")))
        with pytest.raises(ValueError, match="no card"):
            record(model, entry())
    with folder_lock(head), pytest.raises(TercelError, match="is being written by another process"):
        record(model, entry())
    assert {p.name: p.read_bytes() for p in head.iterdir()} == before
    (head / "tercel.json").chmod(0o444)
    with pytest.raises(TercelError, match="read-only"):
        require_recordable(model)


def test_a_result_of_a_head_that_has_changed_is_not_recorded(tmp_path: Path) -> None:
    head = saved(tmp_path / "h")
    model = load_head(head)
    save_head(replace(tiny_draft(), info=replace(model.info, training=TrainingRecord(step=99))), head)
    with pytest.raises(TercelError, match="holds another head than the one that was measured"):
        record(model, entry())


def raises(error: Exception) -> Any:
    def fail(*_: Any) -> None:
        raise error

    return fail
