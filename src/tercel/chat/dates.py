"""Templates that write the day's date: the same tokens tomorrow, for a run that goes on then."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from string import ascii_letters
from typing import Any

from transformers import PreTrainedTokenizerBase

from tercel.chat.arguments import templates_of, with_templates

CLOCK = "strftime_now"  # the one clock that chat templates have
RECORD = "rendered_at"  # key of a head's training record and of a run's journal: a moment in ISO's notation

# Takes the place of the clock. The text of a macro is what it prints, so nothing may stand around its parts; the line's
# end after it is dropped (`trim_blocks`), and the template begins on a line of its own, as it does by itself.
_MACRO = (
    "{%- macro strftime_now(format) -%}{%- set date = namespace(text=format) -%}"
    "{%- for directive, written in TABLE.items() -%}"
    "{%- set date.text = date.text.replace(directive, written) -%}"
    "{%- endfor -%}{{ date.text }}{%- endmacro %}\n"
)
_PERCENT = "\ue000"  # stands for a percent sign that is meant while the directives are replaced


def writes_date(tokenizer: PreTrainedTokenizerBase) -> bool:
    return any(CLOCK in source for source in templates_of(tokenizer).values())


def this_moment() -> datetime:
    """Now, as exactly as records keep it."""
    return datetime.now().replace(microsecond=0)


def as_of(tokenizer: PreTrainedTokenizerBase, moment: datetime) -> PreTrainedTokenizerBase:
    """The tokenizer, whose template takes `moment` for now; itself if the template writes no date."""
    if not writes_date(tokenizer):
        return tokenizer
    prefix = _MACRO.replace("TABLE", json.dumps(_directives(moment)))
    return with_templates(tokenizer, lambda source: prefix + source)


def parse_moment(record: Mapping[str, Any]) -> datetime | None:
    """The moment in a training record or a journal's entry; None if there is none."""
    try:
        return datetime.fromisoformat(record[RECORD])
    except (KeyError, TypeError, ValueError):
        return None


def _directives(moment: datetime) -> dict[str, str]:
    """What `strftime` writes for each of its directives, plain and without padding."""
    table = {"%%": _PERCENT}
    for directive in (f"%{flag}{letter}" for flag in ("", "-") for letter in ascii_letters):
        try:
            written = moment.strftime(directive)
        except ValueError:  # not every system has every one
            continue
        if "%" not in written:
            table[directive] = written
    return {**table, _PERCENT: "%"}
