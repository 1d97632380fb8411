"""What `tercel.json` records of training and measurements: checked when it is read, so that whoever shows it can."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tercel.errors import TercelError

# A type, a list of one form, or an object of forms; "*" stands for keys of any name. A float may be a whole number,
# and what is in a tuple may be null: not known, as an interval of one question.
_TRAINING: dict[str, Any] = {
    "target_name": str,
    "data_licence": str,
    "data": [str],
    "conversations": int,
    "held_out_conversations": int,
    "tokens": int,
    "supervised_tokens": int,
    "draft_vocabulary_coverage": float,
    "dtype": str,
    "step": int,
    "steps": int,
    "chat_template": {"source": str, "rendered": str},
    "recipe": {
        "epochs": float,
        "lr": float,
        "clip": float,
        "ttt_steps": int,
        "decay": float,
        "loss": str,
        "max_length": int,
    },
}
# one of the two counts of held-out text is there, rows from earlier versions; and the stand-in for any name
_MAY_LACK = {"rows", "steps", "*"}
# what is never recorded without the others
_TOGETHER = {
    "conversations": ("data", "tokens", "supervised_tokens"),
    "recipe": ("step", "steps", "dtype", "draft_vocabulary_coverage"),
}
_MEASURED: dict[str, Any] = {
    "held_out": {"tau": float, "rows": int, "steps": int, "alpha": [float]},
    "decoding": [
        {
            "shape": str,
            "dtype": str,
            "device": str,
            "temperature": float,
            "max_new_tokens": int,
            "tasks": {"*": {"questions": int, "tau": (float,), "speedup": float, "speedup_ci95": ([float],)}},
        }
    ],
}
_WORDS = {str: "text", int: "a whole number", float: "a number"}


def check_history(training: dict[str, Any], measured: dict[str, Any], path: Path) -> None:
    """Raises `TercelError` for an entry that is of another kind than this package writes, or lacks a part of what
    belongs to it; entries may be missing."""
    for name, others in _TOGETHER.items():
        for other in others:
            if name in training and other not in training:
                raise TercelError(f"training in {path} has {name} but no {other}; save or fetch the head again")
    for part, entries, forms in (("training", training, _TRAINING), ("measured", measured, _MEASURED)):
        for name, value in entries.items():
            if name in forms:
                _check(value, forms[name], f"{part}.{name}", path)
    held_out = measured.get("held_out")
    if held_out and not {"rows", "steps"} & held_out.keys():
        raise TercelError(f"measured.held_out in {path} has no steps; save or fetch the head again")


def _check(value: Any, form: Any, place: str, path: Path) -> None:
    if isinstance(form, tuple):
        if value is not None:
            _check(value, form[0], place, path)
    elif isinstance(form, dict):
        if not isinstance(value, dict):
            _refuse(value, "an object", place, path)
        if missing := sorted(form.keys() - value.keys() - _MAY_LACK):
            raise TercelError(f"{place} in {path} has no {missing[0]}; save or fetch the head again")
        for key, item in value.items():
            if (wanted := form.get(key, form.get("*"))) is not None:
                _check(item, wanted, f"{place}.{key}", path)
    elif isinstance(form, list):
        if not isinstance(value, list):
            _refuse(value, "a list", place, path)
        for item in value:
            _check(item, form[0], f"an entry of {place}", path)
    elif isinstance(value, bool) or not isinstance(value, int | float if form is float else form):
        _refuse(value, _WORDS[form], place, path)


def _refuse(value: Any, wanted: str, place: str, path: Path) -> None:
    raise TercelError(f"{place} in {path} must be {wanted}, not {str(value)[:40]!r}; save or fetch the head again")
