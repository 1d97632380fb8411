"""A benchmark's acceptance and speedup, kept with the head they belong to: in `tercel.json` and on its card."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from tercel.draft import DraftModel
from tercel.errors import TercelError
from tercel.files import write_json, write_text
from tercel.interop.card import head_card
from tercel.measure.summary import BenchReport

METHOD = "eagle3"


def decoding_entry(report: BenchReport, shape: str) -> dict[str, Any]:
    """What a card says of a benchmark; `shape` describes the draft in words.

    Raises `TercelError` if the benchmark did not run the head, or no answer got past its first token.
    """
    tasks = {}
    for task in report.tasks:
        summary = task.methods.get(METHOD)
        if summary is None or summary.tau is None:
            raise TercelError(f"{task.name} gives no acceptance to record; run {METHOD} on longer answers")
        tasks[task.name] = {
            "questions": summary.questions,
            "tau": summary.tau.value,
            "tau_ci95": summary.tau.ci95,
            "speedup": summary.speedup.value,
            "speedup_ci95": summary.speedup.ci95,
        }
    given = {"template_arguments": dict(report.template_arguments)} if report.template_arguments else {}
    return {
        "shape": shape,
        "dtype": report.dtype,
        "device": f"{report.device}, {report.threads} threads" if report.device == "cpu" else report.device,
        "temperature": report.params.temperature,
        "max_new_tokens": report.params.max_new_tokens,
        **given,
        "timestamp": report.timestamp,
        "tasks": tasks,
    }


def record(model: DraftModel, entry: dict[str, Any]) -> None:
    """Add `entry` to the head's own files; an entry of the same draft, precision, device and temperature gives way.

    Raises `TercelError` if the head was not made by this package, or its folder cannot be written.
    """
    if model.path is None or not (model.path / "tercel.json").is_file():
        raise TercelError(
            f"{model.path or 'the head'} has no tercel.json to record results in; "
            "record them in a head that tercel saved, or leave out --record"
        )
    told = ("shape", "dtype", "device", "temperature", "max_new_tokens", "template_arguments")
    others = [
        old
        for old in model.info.measured.get("decoding", ())
        if any(old.get(part) != entry.get(part) for part in told)
    ]
    measured = {**model.info.measured, "decoding": [*others, entry]}
    stored = json.loads((model.path / "tercel.json").read_text(encoding="utf-8"))
    write_json(model.path / "tercel.json", {**stored, "measured": measured})
    write_text(model.path / "README.md", head_card(replace(model, info=replace(model.info, measured=measured))))
