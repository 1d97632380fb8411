"""Places that a result is written to: links, pipes, devices, private files, names that cannot be.

Devices are the sandbox's own: nodes of the same numbers, so that a command that replaces one harms nothing.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from random import Random

from attack.forks import Ended
from attack.inputs import Command, Kind, Must, Room, Trial
from attack.kinds.arguments import LONG, given
from attack.mutate import ESCAPE, SURROGATE
from attack.world import EXACT


def placed(
    title: str,
    lay: Callable[[Room], str],
    must: Must,
    check: Callable[[Room, Ended], str | None] | None = None,
    out: tuple[str, ...] = (),
) -> Trial:
    """`inspect --json` to a place that `lay` prepares."""

    def make(room: Room, chance: Random) -> Command:
        return Command(["inspect", str(room.world.head), "--json", lay(room)], out=out, must=must, check=check)

    return Trial(f"--json {title}", make)


def _device(room: Room, minor: int) -> str:
    """A device of the sandbox's own, as /dev/null (3) and /dev/full (7) are."""
    path = room.path / "device"
    os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, minor))
    return str(path)


def _linked(room: Room) -> str:
    (room.path / "real.json").write_text("old", encoding="utf-8")
    (room.path / "link.json").symlink_to("real.json")
    return "link.json"


def _link_is_followed(room: Room, ended: Ended) -> str | None:
    if not (room.path / "link.json").is_symlink():
        return "the link was replaced by a file"
    return None if json.loads((room.path / "real.json").read_text("utf-8")) else "nothing was written behind the link"


def _private(room: Room) -> str:
    room.write("old.json", "old").chmod(0o600)
    return "old.json"


def _stays_private(room: Room, ended: Ended) -> str | None:
    mode = (room.path / "old.json").stat().st_mode & 0o777
    return None if mode == 0o600 else f"a file of mode 600 became {mode:o}"


def _to_standard_output(room: Room) -> str:
    (room.path / "stdout").symlink_to("/proc/self/fd/1")
    return "stdout"


def _holds_json(room: Room, ended: Ended) -> str | None:
    text = ended.out.decode("utf-8", "replace")
    return None if '"parameters"' in text else "the report is not on standard output"


def _round(room: Room) -> str:
    (room.path / "link.json").symlink_to("link.json")
    return "link.json"


def _nowhere(room: Room) -> str:
    (room.path / "link.json").symlink_to("there.json")
    return "link.json"


def _listed() -> list[Trial]:
    trials = []
    exported = ("export", "HEAD", "--to", "vllm", "--target", "TARGET", "--out")
    answered = ("data", "regenerate", "ASKED", "--target", "TARGET", "--max-new-tokens", "2", *EXACT, "--out")
    for text in (LONG, "a" * 5000, ESCAPE, SURROGATE, "", ".", "..", "/", "new/deep/er/x", " ", "-x"):
        name, first = repr(text[:30]), text.split("/")[0]
        beside = (text, f"{text}.part", f"{text}.settings.json", first)
        trials += [
            given(f"--json {name}", "inspect", "HEAD", "--json", text, out=(text, first) if text.strip("./") else ()),
            given(f"export --out {name}", *exported, text, out=(text, first)),
            given(f"regenerate --out {name}", *answered, text, out=beside),
        ]
    trials += [
        placed("to a link", _linked, "run", _link_is_followed, ("real.json", "link.json")),
        placed("to a private file", _private, "run", _stays_private, ("old.json",)),
        placed("to a device that takes all", lambda r: _device(r, 3), "run"),
        placed("to a full device", lambda r: _device(r, 7), "refuse"),
        placed("to standard output", _to_standard_output, "run", _holds_json),
        placed("to -", lambda r: "-", "run", _holds_json),
        placed("to a folder", lambda r: "tmp", "refuse"),
        placed("below a file", lambda r: f"{r.write('file', 'x')}/x.json", "refuse"),
        placed("through a link that goes round", _round, "refuse"),
        placed("to a link to nowhere", _nowhere, "either", None, ("link.json", "there.json")),
    ]
    return trials


KIND = Kind("outputs", "places for output", tuple(_listed()), None, quick=(12, 0))
