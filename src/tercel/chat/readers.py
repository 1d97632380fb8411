"""Files and named data sets -> records. A file is recognised by what is in it, not by its name."""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tercel import limits
from tercel.chat import hub
from tercel.chat.conversation import Conversation, Record, TokenizedChat
from tercel.chat.lines import first_character, text_blocks, text_lines
from tercel.chat.records import parse_record
from tercel.errors import TercelError
from tercel.reading import UnreadableError, as_text, check_json, parse_json

_BLANK = re.compile(r"[ \t\r\n]*")
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w.\[\]%-]+)?")


def read_records(source: str | Path, limit: int | None = None, notes: list[str] | None = None) -> Iterator[Record]:
    """Read a JSONL file, a JSON list (both also gzipped), an alias (`hub.ALIASES`) or `org/name[:split]` of
    the Hub.

    `limit`: at most that many records. `notes`: gets one line for each thing a user should know, such as a
    file that is cut off. Raises `TercelError` with file and line for a malformed row, and for an empty
    source.
    """
    records = _all_records(source, [] if notes is None else notes)
    if limit is not None and limit < 1:
        raise TercelError(f"limit must be at least 1, got {limit}")
    empty = True
    for record in itertools.islice(records, None if limit is None else min(limit, sys.maxsize)):
        empty = False
        yield record
    if empty:
        raise TercelError(f"{source} holds no conversations; expected one JSON object a line, or a JSON list")


def read_conversations(
    source: str | Path, limit: int | None = None, notes: list[str] | None = None
) -> Iterator[Conversation]:
    """`read_records` for sources that hold conversations only; raises `TercelError` for any other record."""
    for record in read_records(source, limit, notes):
        if not isinstance(record, Conversation):
            raise TercelError(f"{source}: {record.id} is {_kind(record)}; a conversation with messages is needed here")
        yield record


def _kind(record: Record) -> str:
    return "a list of token ids" if isinstance(record, TokenizedChat) else "preformatted text"


def _all_records(source: str | Path, notes: list[str]) -> Iterator[Record]:
    name = str(source)
    path = Path(source)
    if os.path.isfile(path):
        return _read_file(path, notes)
    if os.path.isdir(path):
        raise TercelError(f"{path} is a folder; name the files in it that are to be read")
    if name in hub.JSON_FILES:
        return _read_file(hub.fetch_json(name), notes)
    if name in hub.ALIASES or (HUB_NAME.fullmatch(name) and not name.endswith((".json", ".jsonl", ".gz"))):
        return _parse_rows(hub.read_rows(hub.ALIASES.get(name, name)), name, "row", name)
    known = ", ".join(sorted({*hub.ALIASES, *hub.JSON_FILES}))
    raise TercelError(f"there is no file {name}; name a file, one of {known}, or org/name[:split] of the Hub")


def _read_file(path: Path, notes: list[str]) -> Iterator[Record]:
    stem = as_text(path.name).removesuffix(".gz").removesuffix(".jsonl").removesuffix(".json")
    if first_character(path) == "[":
        yield from _parse_rows(_json_list(path, notes), str(path), "entry", stem)
    else:
        yield from _parse_rows(json_lines(path), str(path), "line", stem)


def _parse_rows(rows: Iterator[tuple[int, Any]], name: str, unit: str, source: str) -> Iterator[Record]:
    for number, row in rows:
        where = f"{name}, {unit} {number}"
        yield parse_record(row, where=where, default_id=f"{source}-{number}", default_source=source)


def json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """The values of a JSONL file, plain or gzipped, with their line numbers; blank lines are passed over.

    Raises `TercelError`, with the line, for what is no JSON, no UTF-8 or too long, and for a file that cannot be read.
    """
    for number, line in text_lines(path):
        try:
            yield number, parse_json(line)
        except UnreadableError as error:
            raise TercelError(f"{path}, line {number}: {error}; repair or remove it") from error


def _json_list(path: Path, notes: list[str]) -> Iterator[tuple[int, Any]]:
    """The entries of a JSON list, read in blocks; a file that is cut off gives the whole ones and a note."""
    decoder = json.JSONDecoder()
    pieces = text_blocks(path)
    text, number, separated = "", 0, True
    try:
        while not text:  # only white space stands before the list
            text = next(pieces).lstrip()
        at = 1
        while True:
            at = _BLANK.match(text, at).end()  # type: ignore[union-attr]  # matches nothing too
            if text[at : at + 1] == "]":
                _check_end(itertools.chain([text[at + 1 :]], pieces))
                return
            if not separated and at < len(text):
                if text[at] != ",":
                    raise UnreadableError("not JSON (a comma is missing before it)")
                at, separated = at + 1, True
                continue
            try:
                row, end = decoder.raw_decode(text, at)
                check_json(row, text[at:end])
            except json.JSONDecodeError as error:
                if not _is_cut(error, text):
                    raise UnreadableError(f"not JSON ({error.msg})") from error
                if len(text) - at > limits.LINE_BYTES:
                    raise UnreadableError(f"longer than the {limits.LINE_BYTES >> 20} MiB of an entry") from error
                if more := next(pieces, ""):
                    text, at = text[at:] + more, 0
                    continue
                notes.append(f"{path} is cut off: kept the {number} whole entries before the cut")
                return
            except (RecursionError, ValueError) as error:  # Python refuses to convert thousands of digits
                raise UnreadableError("nested too deep, or with a number of thousands of digits") from error
            number, at, separated = number + 1, end, False
            yield number, row
    except UnreadableError as error:
        raise TercelError(f"{path}, entry {number + 1}: {error}; repair or remove it") from error


def _check_end(rest: Iterator[str]) -> None:
    for piece in rest:
        if beyond := piece.strip():
            raise UnreadableError(f"the list has ended before it, but {beyond[:20]!r} follows; make it one list")


def _is_cut(error: json.JSONDecodeError, text: str) -> bool:
    """Whether the text ended too early, rather than being no JSON somewhere in the middle."""
    longest = len("\\uD83E")  # the longest thing, but for strings, that a cut can leave half
    return error.msg.startswith("Unterminated string") or error.pos >= len(text.rstrip()) - longest
