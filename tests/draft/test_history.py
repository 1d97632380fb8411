"""What a head records of its training and of measurements: written again, a record is what it was, to the byte."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tercel.heads
from tercel.draft import MeasuredRecord, TrainingRecord
from tercel.draft.history import DecodingRecord, HeldOut, Recipe, TaskRecord
from tercel.files import as_json

HERE = Path("tercel.json")
SHIPPED = sorted(Path(tercel.heads.__file__).parent.glob("*/tercel.json"))
TASK = {"questions": 1, "tau": None, "tau_ci95": None, "speedup": 1, "speedup_ci95": [1.0, 2], "later": {"x": [1]}}
# null where it may stand, whole numbers for floats, names of other versions at every depth, an order of its own
TRAINING: dict[str, Any] = {
    "step": 3,
    "of a later version": {"a": None},
    "recipe": {"max_length": 9, "note": [1], "epochs": 1, "lr": 1, "clip": 0.5, "ttt_steps": 2, "decay": 0, "loss": ""},
    "draft_vocabulary_coverage": 1,
    "dtype": "float32",
    "chat_template": {"rendered": "r", "seen": True, "source": "s", "arguments": {"thinking": False}},
    "data_licence": "",
    "steps": 3,
}
MEASURED: dict[str, Any] = {
    "decoding": [
        {
            "tasks": {"b": TASK, "a": TASK},
            "max_new_tokens": 4,
            "temperature": 0,
            "shape": "",
            "device": "cpu",
            "dtype": "",
        }
    ],
    "tau": 2.5,
    "held_out": {"rows": 7, "tau": 2, "alpha": [], "loss": float("nan")},
}


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.parent.name)
def test_shipped_heads_are_written_again_as_they_are(file: Path) -> None:
    text = file.read_text("utf-8")
    whole = json.loads(text)
    whole["training"] = TrainingRecord.from_json(whole["training"], "training", file).to_json()
    whole["measured"] = MeasuredRecord.from_json(whole["measured"], "measured", file).to_json()
    assert as_json(whole) == text


def test_entries_order_and_kinds_of_numbers_stay() -> None:
    assert SHIPPED
    for kind, told in ((TrainingRecord, TRAINING), (MeasuredRecord, MEASURED), (MeasuredRecord, {"decoding": []})):
        record = kind.from_json(told, "here", HERE)
        assert as_json(record.to_json()) == as_json(told)
    (run,) = MeasuredRecord.from_json(MEASURED, "measured", HERE).decoding
    assert run.tasks["a"] == TaskRecord(
        questions=1, tau=None, tau_ci95=None, speedup=1, speedup_ci95=(1.0, 2), unknown={"later": {"x": [1]}}
    )


def test_what_is_no_longer_known_is_not_told() -> None:
    record = TrainingRecord.from_json(TRAINING, "training", HERE)
    told = replace(record, data_licence=None, recipe=None).to_json()
    assert TrainingRecord.from_json(told, "training", HERE) == replace(record, data_licence=None, recipe=None)
    assert list(told) == [name for name in TRAINING if name not in ("data_licence", "recipe")]


def test_a_new_record_says_what_is_known_and_no_more() -> None:
    assert TrainingRecord().to_json() == MeasuredRecord().to_json() == {}
    assert TrainingRecord(data=("a",), data_licence="").to_json() == {"data": ["a"], "data_licence": ""}
    task = TaskRecord(questions=1, tau=None, tau_ci95=None, speedup=1.5, speedup_ci95=None)
    assert task.to_json() == {"questions": 1, "tau": None, "tau_ci95": None, "speedup": 1.5, "speedup_ci95": None}
    held_out = HeldOut(alpha=(0.5,), tau=1.5, steps=3, loss=0.25)
    assert json.dumps(held_out.to_json()) == '{"alpha": [0.5], "tau": 1.5, "steps": 3, "loss": 0.25}'
    assert Recipe.of({**TRAINING["recipe"], "layers": (1, 2)}).to_json()["layers"] == [1, 2]


def test_a_measurement_takes_the_place_of_one_under_the_same_conditions() -> None:
    one = DecodingRecord(shape="a", dtype="b", device="c", temperature=0, max_new_tokens=4, timestamp="1", tasks={})
    task = TaskRecord(questions=1, tau=None, tau_ci95=None, speedup=1.5, speedup_ci95=None)
    assert one.measures_as(replace(one, timestamp="2", tasks={"x": task}))
    for other in ({"shape": "b"}, {"temperature": 0.5}, {"template_arguments": {"thinking": False}}):
        assert not one.measures_as(replace(one, **other))
