"""A JSONL file that grows line by line, survives a kill, and is never continued with other settings."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import IO, Any

from tercel.chat.conversation import Conversation
from tercel.errors import TercelError
from tercel.files import write_json


def claim(part: Path, out: Path, conversations: list[Conversation], settings: dict[str, Any]) -> None:
    """Write the settings file, or check that the one beside an existing part file says the same."""
    sidecar = out.with_name(out.name + ".settings.json")
    digest = hashlib.sha256()
    for conversation in conversations:
        digest.update(json.dumps(conversation.to_json(), sort_keys=True).encode())
    mine = {**settings, "prompts": len(conversations), "prompts_sha256": digest.hexdigest()}
    if not part.exists():
        write_json(sidecar, mine)
        return
    try:
        theirs = json.loads(sidecar.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TercelError(f"{part} has no readable {sidecar.name} beside it; remove it to start anew") from error
    for name, value in mine.items():
        if theirs.get(name) != value:
            raise TercelError(
                f"{part} was begun with {name} {theirs.get(name)!r}, not {value!r}; go on with those "
                "settings, remove it, or choose another output"
            )


def finished_ids(part: Path) -> set[str]:
    """Ids in the part file; a last line without its line end was being written when the run died: it is cut
    off."""
    if not part.exists():
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


def append_line(out: IO[str], row: dict[str, Any]) -> None:
    """Write one line and flush it, so that a kill loses no more than the line being written."""
    try:
        out.write(json.dumps(row, ensure_ascii=False) + "\n")
        out.flush()
    except OSError as error:
        reason = error.strerror or error
        raise TercelError(f"writing {out.name} failed: {reason}; free space, then run again to go on") from error
