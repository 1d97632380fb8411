"""`metrics.jsonl`: what a run measured, an entry a step and one an evaluation, written as it goes."""

from __future__ import annotations

import json
import math
from datetime import datetime
from pathlib import Path
from typing import Any

from tercel.chat import dates
from tercel.draft.history import HeldOut
from tercel.draft.json_record import ADVICE
from tercel.errors import TercelError
from tercel.files import sync, write_text
from tercel.growing import json_lines
from tercel.reading import short

_MEASURED = ("loss", "accuracy", "lr", "grad_norm", "tokens", "seconds")


class Journal:
    """Entries are objects with a `step`, one for each; an evaluation's entry has an `eval` as well. Where the chats'
    template writes the date, step 0 has the moment that they were rendered for.

    notes: what `cut` found damaged, in sentences.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.notes: tuple[str, ...] = ()

    def add(self, entry: dict[str, Any]) -> None:
        """Append an entry. Raises `TercelError` if it cannot be written."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(entry) + "\n")
        except OSError as error:
            reason = error.strerror or error
            advice = "free space or restore the right to write, then resume"
            raise TercelError(f"writing {self.path} failed: {reason}; {advice}") from error

    def entries(self) -> list[dict[str, Any]]:
        """All entries but one that was cut off at the end, and those that no run wrote as they are."""
        return self._read()[0]

    def _read(self) -> tuple[list[dict[str, Any]], list[tuple[int, str]]]:
        """The entries, and what is wrong in which lines."""
        entries: list[dict[str, Any]] = []
        wrong: list[tuple[int, str]] = []
        seen: set[tuple[int, bool]] = set()
        for line in json_lines(self.path) if self.path.is_file() else ():
            if line.problem and not line.ended:  # a kill came in the middle of it
                continue
            entry = line.value
            problem = line.problem or _problem(entry)
            if not problem and (key := (entry["step"], "eval" in entry)) in seen:
                problem = f"{'an evaluation' if key[1] else 'an entry'} of step {short(key[0])} again"
            if problem:
                wrong.append((line.number, problem))
            else:
                seen.add(key)
                entries.append(entry)
        return entries, wrong

    def evaluations(self) -> list[dict[str, Any]]:
        return [entry for entry in self.entries() if "eval" in entry]

    def rendered_at(self) -> datetime | None:
        """The moment that the run's chats were rendered for; None where their template writes no date."""
        return next((moment for entry in self.entries() if (moment := dates.parse_moment(entry)) is not None), None)

    def problem(self) -> str:
        """What is wrong with the file, as a clause; "" if nothing is."""
        if not self.path.is_file():
            return f"{self.path} is missing"
        wrong = self._read()[1]
        return self._where(wrong[0]) if wrong else ""

    def _where(self, wrong: tuple[int, str]) -> str:
        number, problem = wrong
        return f"{self.path}, line {number}: {problem}"

    def sync(self) -> None:
        """Wait until the entries are on the disk: a state must not know of steps that its journal lost."""
        if self.path.is_file():
            sync(self.path)

    def clear(self) -> None:
        """Drop all entries."""
        write_text(self.path, "", held=True)

    def cut(self, step: int) -> None:
        """Drop the entries after `step`, which a resumed run makes again, and what is damaged."""
        entries, wrong = self._read()
        kept = [entry for entry in entries if entry["step"] <= step]
        write_text(self.path, "".join(json.dumps(entry) + "\n" for entry in kept), held=True)
        if wrong:
            others = f", with {len(wrong) - 1} more after it" if wrong[1:] else ""
            self.notes = (f"{self._where(wrong[0])}; it is left out{others}",)


def _problem(entry: Any) -> str:
    """Why a value is no entry that a run writes, as a clause; "" if it is one."""
    if not isinstance(entry, dict):
        return f"{short(entry)} is not an object"
    if type(entry.get("step")) is not int or entry["step"] < 0:
        return f"its step is {short(entry.get('step'))}, not a whole number from 0"
    for name in _MEASURED:
        if name in entry and not _is_finite(entry[name]):
            return f"its {name} is {short(entry[name])}, not a number"
    if "eval" in entry:
        return _eval_problem(entry["eval"])
    if "loss" in entry:
        return "" if "accuracy" in entry else "it has a loss without an accuracy"
    return "" if dates.parse_moment(entry) is not None else "it has neither a loss nor an evaluation"


def _eval_problem(values: Any) -> str:
    try:
        held_out = HeldOut.from_json(values, "eval", Path("the row"))
    except TercelError as error:
        return str(error).removesuffix(f"; {ADVICE}")
    if not all(map(_is_finite, (held_out.tau, *held_out.alpha))):  # a loss may have been too large for the dtype
        return "a tau or alpha of its evaluation is not a number"
    return ""


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)
