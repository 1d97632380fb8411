"""Regenerated answers that were stopped, with something changed in them before they go on."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

from attack.forks import Ended
from attack.inputs import Command, Must, Room, Trial
from attack.kinds.changes import Change, both, folder_for, nothing, odd_row, without, write
from attack.world import regenerating


def answers() -> list[Trial]:
    return [
        answered("nothing changed", nothing, "run"),
        answered("no settings", without("out.jsonl.settings.json")),
        answered("settings of a list", write("out.jsonl.settings.json", b"[]")),
        answered("settings of text", write("out.jsonl.settings.json", b"x")),
        answered("settings of null", write("out.jsonl.settings.json", b"null")),
        answered("settings 10,000 deep", write("out.jsonl.settings.json", b"[" * 10_000)),
        answered("settings gone and answers too", both(without("out.jsonl.settings.json"), without("out.jsonl.part"))),
        answered("no answers yet", write("out.jsonl.part", b""), "run"),
        answered("zeros for answers", write("out.jsonl.part", bytes(500))),
        answered("other rows", write("out.jsonl.part", b"[]\n5\n")),
        answered("a row without an id", write("out.jsonl.part", b'{"messages": []}\n')),
        answered("an id that is a list", write("out.jsonl.part", b'{"id": [1]}\n')),
        answered(
            "a row twice",
            lambda f, c: (f / "out.jsonl.part").write_bytes(
                (lambda lines: lines[0] + lines[0] + lines[1])((f / "out.jsonl.part").read_bytes().splitlines(True))
            ),
        ),
        answered(
            "line ends of Windows",
            lambda f, c: (f / "out.jsonl.part").write_bytes(
                (f / "out.jsonl.part").read_bytes().replace(b"\n", b"\r\n")
            ),
        ),
        answered("a row 10,000 deep", write("out.jsonl.part", b"[" * 10_000 + b"]" * 10_000 + b"\n")),
        answered(
            "a BOM",
            lambda f, c: (f / "out.jsonl.part").write_bytes(b"\xef\xbb\xbf" + (f / "out.jsonl.part").read_bytes()),
        ),
        answered("a folder for answers", folder_for("out.jsonl.part"), "refuse"),
        *(answered("an odd row", odd_row("out.jsonl.part")) for _ in range(6)),
    ]


def answered(title: str, change: Change, must: Must = "either") -> Trial:
    def make(room: Room, chance: Random) -> Command:
        out = room.copy(room.world.begun, "begun")
        (out / "whole.jsonl").unlink()
        change(out, chance)
        command = Command(regenerating(room.world, "begun/out.jsonl"), out=("begun",), must=must, check=same_answers)
        return command.but(leaves=True)

    return Trial(f"answers resumed with {title}", make)


def same_answers(room: Room, ended: Ended) -> str | None:
    def rows(file: Path) -> dict[str, Any]:
        return {row["id"]: row["messages"] for row in map(json.loads, file.read_text("utf-8").splitlines())}

    lines = (room.path / "begun" / "out.jsonl").read_text("utf-8").splitlines()
    made, right = rows(room.path / "begun" / "out.jsonl"), rows(room.world.begun / "whole.jsonl")
    if len(lines) != len(right):
        return f"{len(lines)} lines for {len(right)} conversations"
    other = [key for key in right if made.get(key) != right[key]]
    return f"{len(other)} answers are others, such as that of {other[0]}" if other else None
