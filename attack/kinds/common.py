"""Commands and checks that several kinds use."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from attack.forks import Ended
from attack.inputs import Command, Room
from attack.world import EXACT, LENGTH, PROMPT

ASK = ("--prompt", PROMPT, "--max-new-tokens", str(LENGTH), *EXACT)


Change = Callable[[Path], Any]  # something done to a folder


def in_turn(*changes: Change) -> Change:
    """One change after another."""

    def change(folder: Path) -> None:
        for each in changes:
            each(folder)

    return change


def gone(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


def a_folder(name: str) -> Change:
    """A folder where a file should be."""
    return in_turn(gone(name), lambda folder: (folder / name).mkdir())


def a_pipe(name: str) -> Change:
    return in_turn(gone(name), lambda folder: os.mkfifo(folder / name))


def a_circle(name: str) -> Change:
    """A link to itself."""
    return in_turn(gone(name), lambda folder: (folder / name).symlink_to(name))


def put_file(name: str, content: bytes) -> Change:
    return lambda folder: (folder / name).write_bytes(content)


def read(file: Path) -> dict[str, Any]:
    return dict(json.loads(file.read_text("utf-8")))


def same_answer(room: Room, ended: Ended) -> str | None:
    """Whatever a head is, the text is the target's own."""
    said, right = ended.out.decode("utf-8", "replace"), room.world.facts["answer"]
    return None if said == right else f"the text is {said!r}, the target's own is {right!r}"


def report_is_json(name: str, *keys: str) -> Any:
    """A check that the file `name` is an object with these keys."""

    def check(room: Room, ended: Ended) -> str | None:
        try:
            found = json.loads((room.path / name).read_text("utf-8"))
        except (OSError, ValueError) as error:
            return f"{name}: {error}"
        missing = [key for key in keys if key not in found]
        return f"{name} lacks {missing[0]}" if missing else None

    return check


def asking(room: Room, target: Path | str, head: Path | str | None, *more: str) -> Command:
    """`generate` with a head: the text has to be the target's own; without one, anything may come of it."""
    drafts = [str(head)] if head is not None else ["--draft", "none"]
    check = same_answer if head is not None else None
    return Command(["generate", str(target), *drafts, *ASK, *more], check=check, answer=True)


def about_head(chance: Random, room: Room, head: Path) -> Command:
    """One of the verbs that take a HEAD."""
    target = str(room.world.target)
    verb = chance.choice(("inspect", "inspect", "generate", "generate", "doctor", "export", "serve-command"))
    return head_command(verb, room, str(head), target)


def head_command(verb: str, room: Room, head: str, target: str) -> Command:
    if verb == "inspect":
        report = report_is_json("report.json", "head", "tensors")
        return Command(["inspect", head, "--json", "report.json"], out=("report.json",), check=report)
    if verb == "generate":
        return asking(room, target, head, "--force-head")
    if verb == "doctor":
        return Command(["doctor", target, head], codes=frozenset({0, 1}))
    if verb == "export":
        return Command(["export", head, "--to", "vllm", "--target", target, "--out", "made"], out=("made",))
    return Command(["serve-command", head, "--engine", "vllm", "--target", target])


def safetensors(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    """A file of the format with any header (an object, or text as it stands), and any length given for it."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data
