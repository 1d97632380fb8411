"""What a benchmark has measured so far, a line an answer, so that one that was interrupted goes on.

The first line says what answers depend on (target, heads, tasks, settings); a file of another benchmark is never
continued. Answers of all methods to one prompt belong together, since they are compared in pairs: where a run ended
among them, they are asked again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tercel.errors import TercelError
from tercel.files import as_json_line, is_stream
from tercel.growing import json_lines
from tercel.locks import beside, one_at_a_time
from tercel.measure.methods import Run
from tercel.reading import short

ENDING = ".journal.jsonl"
ADVICE = "no benchmark left it like that, so remove it to start over"


@dataclass(frozen=True)
class Asked:
    """A prompt of a benchmark: turn `turn` of a task's question number `number`, both from 0, sampled with `seed`."""

    temperature: float
    task: str
    number: int
    question: str
    turn: int
    seed: int


def journal_of(*outputs: Path | None) -> Path | None:
    """Where a benchmark with these outputs keeps its journal: beside the first that is a file and can be one; None
    without."""
    files = [path for path in outputs if path is not None and not is_stream(path) and _can_be(path)]
    return files[0].with_name(files[0].name + ENDING) if files else None


def _can_be(path: Path) -> bool:
    """Whether a file may be made there, as far as that is known before."""
    folder = next((parent for parent in path.absolute().parents if parent.exists()), None)
    return folder is not None and folder.is_dir() and os.access(folder, os.W_OK)


class Journal:
    """The runs by prompt and method; of no file (`path` None) it keeps nothing."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.kept = 0  # answers that are in the file
        self._runs: dict[Asked, dict[str, tuple[int, Run]]] = {}
        self._sitting = 1
        self._seen: set[int] = set()

    @property
    def sittings(self) -> int:
        """In how many sittings the answers so far were timed; those that only began count for none."""
        return max(1, len(self._seen))

    def runs(self, asked: Asked, methods: Mapping[str, object]) -> dict[str, Run] | None:
        """The runs of all these methods, if all are known."""
        known = self._runs.get(asked, {})
        if not methods.keys() <= known.keys():
            return None
        self._seen |= {known[name][0] for name in methods}
        return {name: known[name][1] for name in methods}

    def add(self, asked: Asked, method: str, run: Run) -> None:
        """Keep a run, in the file too. Raises `TercelError` if that cannot be written."""
        self._seen.add(self._sitting)
        if self.path is None:
            return
        row = {"sitting": self._sitting, **vars(asked), "method": method, **_run_json(run)}
        try:
            with self.path.open("a", encoding="utf-8") as stream:
                stream.write(as_json_line(row))
        except OSError as error:
            reason = error.strerror or error
            raise TercelError(f"writing {self.path} failed: {reason}; free space, then run again to go on") from error
        self.kept += 1

    def done(self) -> None:
        """Its benchmark is written elsewhere: the file goes."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def _read(self, path: Path, key: dict[str, Any]) -> None:
        """Take in what an earlier run left, and cut a line off that it was writing when it died."""
        whole, theirs = 0, key
        for line in json_lines(path):
            if not line.ended:
                break
            where = f"{path}, line {line.number}"
            if line.problem:
                raise TercelError(f"{where}: {line.problem}; {ADVICE}")
            if line.number == 1:
                theirs = _key_of(path, line.value)
            else:
                self._take(line.value, where)
            whole += line.size
        if self.kept:  # what no answer depends on binds nobody
            _check_key(path, theirs, key)
        os.truncate(path, whole)

    def _take(self, row: Any, where: str) -> None:
        try:
            asked = Asked(**{name: row[name] for name in Asked.__dataclass_fields__})
            run, sitting = _run_of(row), int(row["sitting"])
            self._runs.setdefault(asked, {})[str(row["method"])] = (sitting, run)
        except (KeyError, TypeError, ValueError) as error:
            raise TercelError(f"{where}: {short(row)} is no answer of a benchmark; {ADVICE}") from error
        self.kept += 1
        self._sitting = max(self._sitting, sitting + 1)


@contextmanager
def open_journal(path: Path | None, key: dict[str, Any]) -> Iterator[Journal]:
    """The journal at `path`, begun or gone on with. key: all that its answers depend on, as JSON.

    It goes again if no answer was kept. Raises `TercelError` if it is another benchmark's, or damaged, or in use by
    another process, or cannot be written.
    """
    journal = Journal(path)
    if path is None:
        yield journal
        return
    with one_at_a_time(beside(path, "lock"), path):
        try:
            if path.is_file() and path.stat().st_size:
                journal._read(path, key)
            if not journal.kept:
                began = datetime.now(UTC).isoformat(timespec="seconds")
                path.write_text(as_json_line({"benchmark": key, "began": began}), encoding="utf-8")
        except OSError as error:
            raise TercelError(f"cannot write {path}: {error.strerror or error}; choose another place") from error
        try:
            yield journal
        finally:
            if not journal.kept:
                path.unlink(missing_ok=True)


def _key_of(path: Path, first: Any) -> dict[str, Any]:
    key = first.get("benchmark") if isinstance(first, dict) else None
    if not isinstance(key, dict):
        raise TercelError(f"{path} is no journal of a benchmark; move it away, or choose another output")
    return key


def _check_key(path: Path, theirs: dict[str, Any], key: dict[str, Any]) -> None:
    for name in {**key, **theirs}:
        if theirs.get(name) != key.get(name):
            raise TercelError(
                f"{path} is of a benchmark that was stopped and had {name} {short(theirs.get(name))}, not "
                f"{short(key.get(name))}; go on with that, remove the file, or choose another output"
            )


def _run_json(run: Run) -> dict[str, Any]:
    return {**vars(run), "tokens": list(run.tokens), "accepted": list(run.accepted)}


def _run_of(row: dict[str, Any]) -> Run:
    return Run(
        tuple(map(int, row["tokens"])),
        float(row["seconds"]),
        int(row["steps"]),
        tuple(map(int, row["accepted"])),
        int(row["nodes"]),
        {str(phase): float(seconds) for phase, seconds in row["split"].items()},
    )
