"""A JSONL file that grows line by line, survives a kill, and is never continued with other settings."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from tercel.chat import dates
from tercel.chat.answering import TextOf, row_problem
from tercel.chat.conversation import Conversation
from tercel.errors import TercelError
from tercel.files import as_json_line, require_free, sync, write_json
from tercel.growing import json_lines
from tercel.reading import read_json, short

PROMPTS, TEMPLATE = "prompts_sha256", "chat_template"
# what a digest stands for, where it differs: a person cannot compare the two
_DIGESTS = {PROMPTS: "other prompts", TEMPLATE: "another chat template, or other special tokens"}


def settings_file(out: Path) -> Path:
    """What the answers in `out` depend on, kept beside it."""
    return out.with_name(f"{out.name}.settings.json")


def claim(
    part: Path, out: Path, conversations: list[Conversation], settings: dict[str, Any], moment: datetime | None
) -> datetime | None:
    """Write the settings file, or check that the one beside a part file with answers says the same.

    moment: what a template that writes the date takes for now, if the answers begin with this run; None for others.
    Returns the moment that they began with.
    Raises `TercelError` if the file says otherwise, or either of the two is somebody else's.
    """
    sidecar = settings_file(out)
    digest = hashlib.sha256()
    for conversation in conversations:
        digest.update(json.dumps(conversation.to_json(), sort_keys=True).encode())
    mine = {**settings, "prompts": len(conversations), PROMPTS: digest.hexdigest()}
    mine[dates.RECORD] = moment and moment.isoformat(timespec="seconds")
    if os.path.lexists(part) and not part.is_file():
        raise TercelError(f"{part} is not a file; move it away, or choose another output")
    theirs = _read_settings(sidecar)
    if theirs is None and part.exists() and part.stat().st_size:
        raise TercelError(f"{part} has no {sidecar.name} beside it; remove it to start over")
    if theirs is None or not _has_a_line(part):  # settings of a run without an answer bind nobody
        write_json(sidecar, mine)
        return moment
    began = dates.parse_moment(theirs)
    if moment and began:
        mine[dates.RECORD] = theirs[dates.RECORD]
    for name, value in mine.items():
        if theirs.get(name) != value:
            other = _DIGESTS.get(name) or f"{name} {short(theirs.get(name))}, not {short(value)}"
            raise TercelError(
                f"{part} was begun with {other}; continue with those, remove it, or choose another output"
            )
    return began


def _read_settings(sidecar: Path) -> dict[str, Any] | None:
    """What an earlier run wrote; None if there is no file. Raises `TercelError` if it is somebody else's."""
    if not os.path.lexists(sidecar):
        return None
    settings = read_json(sidecar, "move it away to start over")
    if PROMPTS not in settings:
        raise TercelError(f"{sidecar} does not hold the settings of an earlier run; move it away")
    return settings


def _has_a_line(part: Path) -> bool:
    """Whether a whole line is in the part file."""
    if not os.path.lexists(part):
        return False
    with part.open("rb") as stream:
        return stream.readline().endswith(b"\n")


def drop_if_empty(part: Path, out: Path) -> None:
    """Leave nothing behind of a run that ended without an answer."""
    if part.is_file() and part.stat().st_size == 0:
        part.unlink()
        settings_file(out).unlink(missing_ok=True)


def finish(part: Path, out: Path) -> None:
    """Give the part file its final name. Raises `TercelError` if that was taken meanwhile."""
    require_free(out)
    try:
        sync(part)
        os.replace(part, out)
        sync(out.parent)
    except OSError as error:
        raise TercelError(f"{part} is finished but could not be renamed to {out.name}: {error.strerror}") from error


def finished_ids(part: Path, conversations: Sequence[Conversation], text_of: TextOf | None) -> set[str]:
    """Ids in the part file; a last line without its line end was being written when the run died: it is cut off.

    text_of: as in `row_problem`. Raises `TercelError` for a line that no run with these prompts wrote, and for a
    conversation that is there twice.
    """
    if not part.exists():
        return set()
    sources = {conversation.id: conversation for conversation in conversations}
    places: dict[str, int] = {}  # the line of each
    whole = 0
    for line in json_lines(part):
        if not line.ended:
            break
        if problem := line.problem or _line_problem(line.value, sources, places, text_of):
            raise TercelError(
                f"{part}, line {line.number}: {problem}; no run left the line like that, so remove it, and what is "
                "missing then is answered"
            )
        places[line.value["id"]] = line.number
        whole += line.size
    os.truncate(part, whole)
    return set(places)


def _line_problem(
    row: Any, sources: dict[str, Conversation], places: dict[str, int], text_of: TextOf | None
) -> str:
    if not isinstance(row, dict) or not isinstance(row.get("id"), str):
        return f"{short(row)} is not a conversation with an id"
    if row["id"] in places:
        return f"{short(row['id'])} is in line {places[row['id']]} already"
    if row["id"] not in sources:
        return f"{short(row['id'])} is none of the prompts"
    return row_problem(row, sources[row["id"]], text_of)


@contextmanager
def appending(part: Path) -> Iterator[IO[str]]:
    """The part file, open to be continued. Raises `TercelError` if it cannot be."""
    try:
        out = part.open("a", encoding="utf-8")
    except OSError as error:
        raise TercelError(f"cannot write {part}: {error.strerror or error}; choose another output") from error
    with out:
        yield out


def append_line(out: IO[str], row: dict[str, Any]) -> None:
    """Write one line and flush it, so that a kill loses no more than the line being written."""
    try:
        out.write(as_json_line(row))
        out.flush()
    except OSError as error:
        reason = error.strerror or error
        raise TercelError(f"writing {out.name} failed: {reason}; free space, then run again to resume") from error
