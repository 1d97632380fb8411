"""A benchmark's acceptance and speedup, kept with the head they belong to: in `tercel.json` and on its card."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from tercel import limits
from tercel.decode.proposers import EAGLE3
from tercel.draft import DraftModel, MeasuredRecord, TrainingRecord
from tercel.draft.history import DecodingRecord, TaskRecord
from tercel.errors import TercelError
from tercel.file_set import CARD, RECORD, file_set, may_replace_card, refuse_foreign, settle
from tercel.files import as_json, put_text
from tercel.interop.card import head_card, with_results
from tercel.locks import folder_lock
from tercel.measure.machine import in_precision
from tercel.measure.summary import BenchReport
from tercel.reading import UnreadableError, read_json, read_text


def decoding_entry(report: BenchReport, shape: str) -> DecodingRecord:
    """What a card says of a benchmark; `shape` describes the draft in words.

    Raises `TercelError` if the benchmark did not run the head.
    """
    tasks = {}
    for task in report.tasks:
        summary = task.methods.get(EAGLE3)
        if summary is None:
            raise TercelError(f"{task.name} was not answered with {EAGLE3}, so there is nothing to record of it")
        tasks[task.name] = TaskRecord(
            questions=summary.questions,
            tau=summary.tau.value if summary.tau is not None else None,
            tau_ci95=_pair(summary.tau.ci95) if summary.tau is not None else None,
            speedup=summary.speedup.value,
            speedup_ci95=_pair(summary.speedup.ci95),
        )
    return DecodingRecord(
        shape=shape,
        dtype=in_precision(report.dtype, report.weights),
        device=f"{report.device}, {report.threads} threads" if report.device == "cpu" else report.device,
        temperature=report.params.temperature,
        max_new_tokens=report.params.max_new_tokens,
        template_arguments=dict(report.template_arguments) or None,
        timestamp=report.timestamp,
        tasks=tasks,
    )


def _pair(ci95: list[float] | None) -> tuple[float, ...] | None:
    return None if ci95 is None else tuple(ci95)


def require_recordable(model: DraftModel) -> Path:
    """The folder that results of `model` are kept in; to be asked before the benchmark.

    Raises `TercelError` if the head was not made by this package, or its files cannot be replaced.
    """
    folder = model.path
    if folder is None or not (folder / RECORD).is_file():
        raise TercelError(
            f"{folder or 'the head'} has no tercel.json to record results in; "
            "record them in a head that tercel saved, or leave out --record"
        )
    refuse_foreign(folder, [RECORD])
    if not os.access(folder, os.W_OK):
        raise TercelError(f"{folder} cannot be written to; record in a copy of the head, or leave out --record")
    return folder


def record(model: DraftModel, entry: DecodingRecord) -> None:
    """Add `entry` to the head's own files; an entry of the same draft, precision, device and temperature gives way.

    Record and card change together or not at all; of a card that was edited, only the section of results changes.
    Raises `TercelError` if the head was not made by this package, has changed since it was loaded, is in use by
    another process, or cannot be written.
    """
    folder = require_recordable(model)
    with folder_lock(folder):
        settle(folder)
        stored = read_json(folder / RECORD)
        if TrainingRecord.from_json(stored.get("training"), "training", folder / RECORD) != model.info.training:
            raise TercelError(f"{folder} holds another head than the one that was measured; measure that one")
        old = MeasuredRecord.from_json(stored.get("measured"), "measured", folder / RECORD)
        others = (run for run in old.decoding if not run.measures_as(entry))
        new = replace(old, decoding=(*others, entry))
        with file_set(folder, shared=() if may_replace_card(folder) else (CARD,)) as staging:
            put_text(staging / RECORD, as_json({**stored, "measured": new.to_json()}))
            put_text(staging / CARD, _card(folder / CARD, model, old, new))


def _card(file: Path, model: DraftModel, old: MeasuredRecord, new: MeasuredRecord) -> str:
    """The new card; what somebody else wrote into the one with the `old` results stays."""
    whole = head_card(replace(model, info=replace(model.info, measured=new)))
    if may_replace_card(file.parent):
        return whole
    try:
        text = read_text(file, limits.JSON_BYTES)
    except (OSError, UnicodeDecodeError, UnreadableError) as error:
        raise TercelError(f"{file} cannot be read ({error}), so no results are added to it; move it away") from error
    untouched = text == head_card(replace(model, info=replace(model.info, measured=old)))
    return whole if untouched else with_results(text, new)
