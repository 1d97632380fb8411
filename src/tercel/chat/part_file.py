"""A JSONL file that grows line by line, survives a kill, and is never continued with other settings."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from tercel.chat.conversation import Conversation
from tercel.errors import TercelError
from tercel.files import require_free, sync, write_json


def settings_file(out: Path) -> Path:
    """What the answers in `out` depend on, kept beside it."""
    return out.with_name(f"{out.name}.settings.json")


def claim(part: Path, out: Path, conversations: list[Conversation], settings: dict[str, Any]) -> None:
    """Write the settings file, or check that the one beside a part file with answers says the same.

    Raises `TercelError` if it says otherwise, or is a file of somebody else.
    """
    sidecar = settings_file(out)
    digest = hashlib.sha256()
    for conversation in conversations:
        digest.update(json.dumps(conversation.to_json(), sort_keys=True).encode())
    mine = {**settings, "prompts": len(conversations), "prompts_sha256": digest.hexdigest()}
    theirs = _read_settings(sidecar)
    if theirs is None and os.path.lexists(part) and part.stat().st_size:
        raise TercelError(f"{part} has no {sidecar.name} beside it; remove it to start anew")
    if theirs is None or not _has_a_line(part):  # settings of a run without an answer bind nobody
        write_json(sidecar, mine)
        return
    for name, value in mine.items():
        if theirs.get(name) != value:
            raise TercelError(
                f"{part} was begun with {name} {theirs.get(name)!r}, not {value!r}; go on with those "
                "settings, remove it, or choose another output"
            )


def _read_settings(sidecar: Path) -> dict[str, Any] | None:
    """What an earlier run wrote; None if there is no file. Raises `TercelError` if it is somebody else's."""
    if not os.path.lexists(sidecar):
        return None
    try:
        settings = json.loads(sidecar.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise TercelError(f"{sidecar} cannot be read ({error}); move it away to start anew") from error
    if not isinstance(settings, dict) or "prompts_sha256" not in settings:
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


def finished_ids(part: Path) -> set[str]:
    """Ids in the part file; a last line without its line end was being written when the run died: it is cut
    off."""
    if not os.path.lexists(part):
        return set()
    whole, ids = 0, set()
    with part.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            if not line.endswith(b"\n"):
                break
            try:
                ids.add(json.loads(line)["id"])
            except (ValueError, KeyError, TypeError) as error:
                raise TercelError(f"{part}, line {number}: not a finished conversation; remove the line") from error
            whole += len(line)
    os.truncate(part, whole)
    return ids


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
        out.write(json.dumps(row, ensure_ascii=False) + "\n")
        out.flush()
    except OSError as error:
        reason = error.strerror or error
        raise TercelError(f"writing {out.name} failed: {reason}; free space, then run again to go on") from error
