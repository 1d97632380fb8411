"""Files and named data sets -> records. A file is recognised by what is in it, not by its name."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import IO, Any

from tercel.chat import hub
from tercel.chat.conversation import Conversation, Record, TokenizedChat
from tercel.chat.records import parse_record
from tercel.errors import TercelError

BLOCK = 1 << 20  # characters read at a time from a JSON list
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
    for record in islice(records, limit):
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


def read_tokenized(source: str | Path, limit: int | None = None) -> Iterator[TokenizedChat]:
    """`read_records` for files of `{"id", "p": [prompt ids], "g": [answer ids]}` lines only."""
    for record in read_records(source, limit):
        if not isinstance(record, TokenizedChat):
            raise TercelError(f'{source}: {record.id} is not token ids; expected the keys "p" and "g"')
        yield record


def _kind(record: Record) -> str:
    return "a list of token ids" if isinstance(record, TokenizedChat) else "preformatted text"


def _all_records(source: str | Path, notes: list[str]) -> Iterator[Record]:
    name = str(source)
    path = Path(source)
    if path.is_file():
        return _read_file(path, notes)
    if path.is_dir():
        raise TercelError(f"{path} is a folder; name the files in it that are to be read")
    if name in hub.JSON_FILES:
        return _read_file(hub.fetch_json(name), notes)
    if name in hub.ALIASES or (HUB_NAME.fullmatch(name) and not name.endswith((".json", ".jsonl", ".gz"))):
        return _parse_rows(hub.read_rows(hub.ALIASES.get(name, name)), name, "row", name)
    known = ", ".join(sorted({*hub.ALIASES, *hub.JSON_FILES}))
    raise TercelError(f"there is no file {name}; name a file, one of {known}, or org/name[:split] of the Hub")


def _read_file(path: Path, notes: list[str]) -> Iterator[Record]:
    stem = path.name.removesuffix(".gz").removesuffix(".jsonl").removesuffix(".json")
    try:
        with _open(path) as stream:
            start = stream.read(1)
            while start and start in " \t\r\n\ufeff":
                start = stream.read(1)
        with _open(path) as stream:
            if start == "[":
                yield from _parse_rows(_json_list(stream, path, notes), str(path), "entry", stem)
            else:
                yield from _parse_rows(_json_lines(stream, path), str(path), "line", stem)
    except (OSError, EOFError, UnicodeDecodeError) as error:  # gzip raises EOFError for a cut file
        raise TercelError(f"cannot read {path}: {error}; is the file whole, and UTF-8 text or gzip?") from error


def _open(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig")
    return path.open(encoding="utf-8-sig")


def _parse_rows(rows: Iterator[tuple[int, Any]], name: str, unit: str, source: str) -> Iterator[Record]:
    for number, row in rows:
        where = f"{name}, {unit} {number}"
        yield parse_record(row, where=where, default_id=f"{source}-{number}", default_source=source)


def _json_lines(stream: IO[str], path: Path) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(stream, 1):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except json.JSONDecodeError as error:
            raise TercelError(
                f"{path}, line {number}: not JSON ({error.msg}, column {error.colno}); repair or remove it"
            ) from error


def _json_list(stream: IO[str], path: Path, notes: list[str]) -> Iterator[tuple[int, Any]]:
    """The entries of a JSON list, read in blocks; a file that is cut off gives the whole ones and a note."""
    decoder = json.JSONDecoder()
    text, number, block = "", 0, BLOCK
    while "[" not in text:  # only white space stands before it
        text += stream.read(block)
    at = text.index("[") + 1
    while True:
        at = _skip(text, at, " \t\r\n" if number == 0 else " \t\r\n,")
        try:
            if text[at : at + 1] == "]":
                return
            row, end = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            more = stream.read(block)
            if more:
                text, at, block = text[at:] + more, 0, 2 * block  # doubling keeps a long entry's retries few
                continue
            if not _is_cut(error, text):
                raise TercelError(f"{path}, entry {number + 1}: not JSON ({error.msg}); repair or remove it") from error
            notes.append(f"{path} is cut off: kept the {number} whole entries before the cut")
            return
        number, at, block = number + 1, end, BLOCK
        yield number, row


def _is_cut(error: json.JSONDecodeError, text: str) -> bool:
    """Whether the text ended too early, rather than being no JSON somewhere in the middle."""
    longest = len("\\uD83E")  # the longest thing, but for strings, that a cut can leave half
    return error.msg.startswith("Unterminated string") or error.pos >= len(text.rstrip()) - longest


def _skip(text: str, at: int, characters: str) -> int:
    while at < len(text) and text[at] in characters:
        at += 1
    return at
