"""The check-up of a head beside its target, without running it: one finding after another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tercel.chat.template import TemplateRefusalError
from tercel.doctor.findings import CheckUp, Finding
from tercel.doctor.head_checks import (
    fit_findings,
    layer_findings,
    norm_findings,
    position_findings,
    rope_findings,
)
from tercel.doctor.template_check import template_findings
from tercel.doctor.weight_checks import (
    embedding_findings,
    precision_findings,
    quantisation_findings,
    vocabulary_findings,
)
from tercel.draft import DraftModel
from tercel.draft.misfits import misfits
from tercel.heads import known_as
from tercel.interop.engines import ENGINES, as_given
from tercel.interop.formats.head_files import HeadFiles
from tercel.interop.misread import misread_by
from tercel.target_model.protocol import TargetModel

_PROMPT = 16  # tokens that features are looked at on


def examine(model: DraftModel, target: TargetModel) -> CheckUp:
    """Everything that can be told of a head and its target from files and a few tokens.

    Raises `TercelError` only for files that cannot be read; whatever does not fit is a finding.
    """
    return CheckUp(target.source.name, known_as(model.path), model.format, tuple(_findings(model, target)))


def fits(model: DraftModel, target: TargetModel) -> bool:
    """Whether the head can be run with the target at all."""
    return all(misfit.severity != "refuse" for misfit in misfits(model, target))


def as_loaded(report: CheckUp, model: DraftModel, target: TargetModel, engine: str) -> CheckUp:
    """The check-up with one check more: whether the engine would load the head's folder as meant (if it takes
    folders).

    Only a warning, since the server may have been given another folder.
    """
    if engine not in ENGINES or ENGINES[engine].takes_gguf or model.path is None:
        return report
    doubt = misread_by(as_given(engine, model.format), model, model.path, target.config.model_type)
    finding = Finding(f"loaded by {engine}", "ok", "the engine's loader reads the folder as it is meant")
    if doubt is not None:
        advice = f"serve a folder that `tercel export HEAD --to {engine}` wrote, not this one"
        finding = Finding(f"loaded by {engine}", "warning", f"as the folder stands, {doubt}", advice)
    return replace(report, findings=(*report.findings, finding))


def without_comparison(report: CheckUp) -> CheckUp:
    """The check-up of a head that cannot be run here, so that no server can be compared with it."""
    finding = Finding(
        "server acceptance",
        "note",
        "the head does not fit the target, so the server was not asked anything",
        "fix what is named above first",
    )
    return replace(report, findings=(*report.findings, finding))


def _findings(model: DraftModel, target: TargetModel) -> Iterator[Finding]:
    files = HeadFiles.read(model.path) if model.path is not None else HeadFiles()
    yield from fit_findings(model, target)
    if target.tokenizer_or_none is not None:
        try:
            yield from template_findings(target.tokenizer, model.info.training, model.path)
        except TemplateRefusalError as error:
            yield Finding("template", "problem", f"the template refuses a plain conversation ({error})", "repair it")
    yield from layer_findings(model, target, files)
    yield from norm_findings(model, files)
    yield from rope_findings(model, target, files)
    yield from position_findings(model, target, files)
    yield from vocabulary_findings(model, target)
    yield from embedding_findings(model, target)
    yield from precision_findings(model, target, files, _some_tokens(target))
    yield from quantisation_findings(target, files)
    for warning in model.warnings:
        yield Finding("file", "warning", warning)


def _some_tokens(target: TargetModel) -> list[int]:
    """Different tokens spread over the vocabulary, the first one first, as at the start of a text."""
    step = max(1, target.vocab_size // _PROMPT)
    return list(range(0, target.vocab_size, step))[:_PROMPT]
