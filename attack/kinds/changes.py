"""Changes to the files of a folder, by name: for runs and answers that are to go on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from attack.mutate import change_json, spoil_bytes

Change = Callable[[Path, Random], Any]


def without(name: str) -> Change:
    def change(folder: Path, chance: Random) -> None:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return change


def spoil(name: str) -> Change:
    def change(folder: Path, chance: Random) -> None:
        (folder / name).write_bytes(spoil_bytes(chance, (folder / name).read_bytes())[1])

    return change


def odd_row(name: str) -> Change:
    """Something odd in a row of a JSONL file, or such a row beside the sound one, or rows out of order."""

    def change(folder: Path, chance: Random) -> None:
        lines = (folder / name).read_bytes().splitlines(keepends=True)
        ended = [number for number, line in enumerate(lines) if line.endswith(b"\n")]
        at = chance.choice(ended)
        odd = change_json(chance, json.loads(lines[at]))[1].replace(b"\n", b" ") + b"\n"
        way = chance.choice(("instead", "instead", "instead", "beside", "order"))
        if way == "order":
            lines[: len(ended)] = chance.sample(lines[: len(ended)], len(ended))
        else:
            lines[at : at + (way == "instead")] = [odd]
        (folder / name).write_bytes(b"".join(lines))

    return change


def flip(name: str) -> Change:
    """One bit in the second half, where tensors are."""

    def change(folder: Path, chance: Random) -> None:
        data = bytearray((folder / name).read_bytes())
        data[chance.randrange(len(data) // 4, 3 * len(data) // 4)] ^= 4
        (folder / name).write_bytes(data)

    return change


def cut(name: str, share: float) -> Change:
    def change(folder: Path, chance: Random) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: int(len(data) * share)])

    return change


def write(name: str, data: bytes) -> Change:
    return lambda folder, chance: (folder / name).write_bytes(data)


def folder_for(name: str) -> Change:
    def change(folder: Path, chance: Random) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return change


def both(*changes: Change) -> Change:
    return lambda folder, chance: [change(folder, chance) for change in changes]


def nothing(folder: Path, chance: Random) -> None:
    pass
