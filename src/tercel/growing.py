"""JSONL files that a run lengthens line by line, read back as far as it came."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tercel import limits
from tercel.errors import TercelError
from tercel.reading import UnreadableError, parse_json


@dataclass(frozen=True)
class JsonLine:
    """number: counted from 1; size: in bytes, its end included; ended: whether it has one, which a run that died while
    writing the last line did not give it; value: what it holds, or None with `problem`, a clause that says why."""

    number: int
    size: int
    ended: bool
    value: Any
    problem: str = ""


def json_lines(path: Path) -> Iterator[JsonLine]:
    """All lines of the file, one in memory at a time. Raises `TercelError` if it cannot be read."""
    try:
        with path.open("rb") as stream:
            number = 0
            while line := stream.readline(limits.LINE_BYTES + 1):
                number += 1
                yield _line(number, line, stream)
    except OSError as error:
        raise TercelError(f"cannot read {path}: {error.strerror or error}; check its rights") from error


def _line(number: int, line: bytes, stream: IO[bytes]) -> JsonLine:
    if len(line) > limits.LINE_BYTES:
        size, end = len(line), line
        while not end.endswith(b"\n") and (end := stream.readline(limits.LINE_BYTES)):
            size += len(end)
        return JsonLine(number, size, end.endswith(b"\n"), None, f"longer than {limits.LINE_BYTES >> 20} MiB")
    ended = line.endswith(b"\n")
    try:
        return JsonLine(number, len(line), ended, parse_json(line.decode()))
    except UnicodeDecodeError as error:
        return JsonLine(number, len(line), ended, None, f"byte {error.start + 1} is not UTF-8")
    except UnreadableError as error:
        return JsonLine(number, len(line), ended, None, str(error))
