"""Training runs and regenerated answers that were stopped, with something changed in them before they go on.

What a run left is taken up exactly or refused: the same command again gives the very head that an unbroken run gives,
or one sentence. What lies beside a run, and was not made by it, stays.
"""

from __future__ import annotations

import hashlib
import shutil
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from attack.forks import Ended
from attack.inputs import Command, Kind, Must, Room, Trial
from attack.kinds.answers import answered, answers
from attack.kinds.changes import Change, both, cut, flip, folder_for, nothing, odd_row, spoil, without, write
from attack.kinds.common import read
from attack.mutate import to_json

FILES = (
    "model.safetensors",
    "config.json",
    "tercel.json",
    "README.md",
    "training/state.pt",
    "training/metrics.jsonl",
    "last/model.safetensors",
    "last/tercel.json",
    "last/config.json",
)


def resumed(title: str, change: Change, must: Must = "either", done: bool = False) -> Trial:
    """The stopped (or, if `done`, the finished) run with `change` done to its folder, and its command given again."""

    def make(room: Room, chance: Random) -> Command:
        out = room.copy(room.world.done if done else room.world.stopped, "head")
        change(out, chance)
        command = Command(room.world.training("head"), out=("head",), must=must, check=same_head)
        return command.but(leaves=True)

    return Trial(f"{'finished' if done else 'resumed'} with {title}", make)


def featured(title: str, change: Change, must: Must = "either") -> Trial:
    """A run that reads features, with `change` done to them."""

    def make(room: Room, chance: Random) -> Command:
        change(room.copy(room.world.features, "features"), chance)
        asked = room.world.training("head", "--features", "features")
        return Command(asked, out=("head",), must=must, check=partial(same_head, features=True)).but(leaves=True)

    return Trial(f"run with {title}", make)


def fresh(title: str, lay: Change, must: Must, check: Any = None, out: tuple[str, ...] = ("head",)) -> Trial:
    """A run begun in a folder that holds what `lay` put there."""

    def make(room: Room, chance: Random) -> Command:
        (room.path / "head").mkdir()
        lay(room.path / "head", chance)
        return Command(room.world.training("head"), out=out, must=must, check=check)

    return Trial(f"begun in a folder with {title}", make)


def same_head(room: Room, ended: Ended, features: bool = False) -> str | None:
    """The head, byte for byte, and all the files of a run; features: of one that read them."""
    world = room.world.featured if features else room.world.done
    for name in ("model.safetensors", "config.json"):
        made, right = room.path / "head" / name, world / name
        if not made.is_file():
            return f"there is no {name} in the end"
        if _digest(made) != _digest(right):
            return f"{name} is not that of the unbroken run"
    made_json, right_json = read(room.path / "head" / "tercel.json"), read(world / "tercel.json")
    return None if made_json["measured"] == right_json["measured"] else "other acceptance than the unbroken run's"


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def with_foreign(room: Room, ended: Ended) -> str | None:
    """What was laid beside the run is still there."""
    for name in ("thesis.txt", "src/main.py", ".git/config"):
        if not (room.path / "head" / name).is_file():
            return f"{name}, which no run made, is gone"
    return same_head(room, ended)


def _lay_foreign(folder: Path, chance: Random) -> None:
    for name in ("thesis.txt", "src/main.py", ".git/config"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("precious", encoding="utf-8")


def _with_training(folder: Path, chance: Random) -> None:
    """Somebody's project that has a folder named as ours."""
    _lay_foreign(folder, chance)
    (folder / "training").mkdir()
    (folder / "training" / "plan.txt").write_text("run 5 km", encoding="utf-8")


def _with_tercel_json(folder: Path, chance: Random) -> None:
    _lay_foreign(folder, chance)
    (folder / "tercel.json").write_text("{}", encoding="utf-8")


def _tensor_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _spoil_features(way: str) -> Change:
    """All files of features changed, or one of them."""

    def change(folder: Path, chance: Random) -> None:
        files = _tensor_files(folder)
        for file in files if way != "one bit" else [chance.choice(files)]:
            data = bytearray(file.read_bytes())
            half = len(data) // 2
            if way == "one bit":
                data[chance.randrange(half, len(data))] ^= 16
            elif way == "zeros":
                data[half:] = bytes(len(data) - half)
            else:
                del data[half if way == "cut" else 0 :]
            file.write_bytes(data)

    return change


def _exchange(folder: Path, chance: Random) -> None:
    files = _tensor_files(folder)
    contents = [file.read_bytes() for file in files]
    for file, data in zip(files, contents[1:] + contents[:1], strict=True):
        file.write_bytes(data)


def _listed() -> list[Trial]:
    trials = [
        resumed("nothing changed", nothing, "run"),
        featured("features as they were", nothing, "run"),
        resumed("files of others beside it", _lay_foreign, "run"),
        fresh("nothing", nothing, "run", same_head),
        fresh("somebody's files", _lay_foreign, "refuse"),
        fresh("somebody's folder named training", _with_training, "refuse"),
        fresh("somebody's tercel.json", _with_tercel_json, "refuse"),
        fresh("an empty folder named training", lambda f, c: (f / "training").mkdir(), "either", same_head),
        fresh("a folder named last", lambda f, c: (f / "last").mkdir(), "either", same_head),
        resumed("no training folder", without("training"), "either"),
        resumed("no last head", without("last"), "either"),
        resumed("no journal", without("training/metrics.jsonl"), "either"),
    ]
    for name in FILES:
        trials += [
            resumed(f"{name} gone", without(name)),
            resumed(f"{name} empty", write(name, b"")),
            resumed(f"{name} cut off", cut(name, 0.6)),
            resumed(f"one bit of {name}", flip(name)),
            resumed(f"zeros for {name}", write(name, bytes(3000))),
            resumed(f"a folder for {name}", folder_for(name)),
        ]
    for name in FILES[:6]:  # a finished run has nothing left to write, so that what is broken stays broken
        trials += [
            resumed(f"{name} gone", without(name), done=True),
            resumed(f"{name} cut off", cut(name, 0.6), done=True),
            resumed(f"one bit of {name}", flip(name), done=True),
        ]
    trials += [
        resumed(
            "a state of another kind", lambda f, c: shutil.copy(f / "model.safetensors", f / "training" / "state.pt")
        ),
        resumed(
            "the heads exchanged", lambda f, c: shutil.copy(f / "last" / "model.safetensors", f / "model.safetensors")
        ),
        resumed(
            "a journal of other rows",
            write("training/metrics.jsonl", b'{"step": "x"}\n[]\n5\n{"step": 1, "eval": 3}\n'),
        ),
        resumed("a journal of deep lists", write("training/metrics.jsonl", b"[" * 10_000 + b"\n")),
        resumed("a journal that is no UTF-8", write("training/metrics.jsonl", b"\xff\xfe\n")),
        resumed("a journal without an end", cut("training/metrics.jsonl", 0.5)),
        resumed(
            "a journal that claims the best",
            lambda f, c: (
                (f / "training" / "metrics.jsonl")
                .open("a")
                .write('{"step": 4, "eval": {"tau": 99.0, "alpha": [1.0], "rows": 5}}\n')
            ),
        ),
        resumed(
            "another run's tercel.json",
            lambda f, c: (f / "tercel.json").write_bytes(to_json({**read(f / "tercel.json"), "training": {}})),
        ),
        *(
            featured(f"features spoilt: {way}", _spoil_features(way))
            for way in ("one bit", "cut", "zeros", "empty")
        ),
        featured("features exchanged", _exchange),
        resumed(
            "leftovers of writing",
            both(write(".model.safetensors.abc.part", b"x"), lambda f, c: (f.parent / ".head.abc.part").mkdir()),
            "either",
        ),
        *answers(),
        *(resumed("an odd row in its journal", odd_row("training/metrics.jsonl"), "run") for _ in range(6)),
    ]
    return trials


def further(chance: Random) -> Trial:
    which = chance.random()
    if which < 0.5:
        name = chance.choice((*FILES, "training/state.pt", "training/metrics.jsonl", "model.safetensors"))
        return resumed(f"bytes of {name} changed", chance.choice((spoil, flip))(name))
    if which < 0.7:
        return resumed("an odd row in its journal", odd_row("training/metrics.jsonl"), "run")
    change = chance.choice((spoil, odd_row))
    return answered("bytes changed" if change is spoil else "an odd row", change("out.jsonl.part"))


KIND = Kind("runs", "stopped runs and answers, resumed", tuple(_listed()), further, count=170, quick=(6, 0))
