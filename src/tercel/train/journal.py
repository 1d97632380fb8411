"""`metrics.jsonl`: what a run measured, a row a step and a row an evaluation, written as it goes."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

from tercel.chat import dates
from tercel.errors import TercelError
from tercel.files import sync, write_text


class Journal:
    """Rows are objects with a `step`; those of an evaluation have an `eval` as well. Where the chats' template writes
    the date, step 0 has the moment that they were rendered for."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, row: dict[str, Any]) -> None:
        """Append a row. Raises `TercelError` if it cannot be written."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(row) + "\n")
        except OSError as error:
            reason = error.strerror or error
            raise TercelError(f"writing {self.path} failed: {reason}; free space, then resume") from error

    def rows(self) -> list[dict[str, Any]]:
        """All rows but one that was cut off in the middle, or is damaged."""
        if not self.path.is_file():
            return []
        rows = []
        for line in self.path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                rows.append(row)
        return rows

    def evaluations(self) -> list[dict[str, Any]]:
        return [row for row in self.rows() if "eval" in row]

    def rendered_at(self) -> datetime | None:
        """The moment that the run's chats were rendered for; None where their template writes no date."""
        return next((moment for row in self.rows() if (moment := dates.parse_moment(row)) is not None), None)

    def sync(self) -> None:
        """Wait until the rows are on the disk: a state must not know of steps that its journal lost."""
        if self.path.is_file():
            sync(self.path)

    def cut(self, step: int) -> None:
        """Drop the rows after `step`: a resumed run makes them again."""
        kept = [row for row in self.rows() if row["step"] <= step]
        write_text(self.path, "".join(json.dumps(row) + "\n" for row in kept), held=True)
