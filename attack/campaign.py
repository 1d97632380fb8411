"""A campaign: every input laid out, run, judged, and what came of it."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from attack import forks
from attack.child import Surroundings
from attack.forks import Ended
from attack.inputs import Command, Kind, Room, remove
from attack.verdicts import faults, summary
from attack.watch import picture, quick_picture
from attack.world import World, make_world

PROGRAMS = 41  # every 41st input runs as a program of its own, as a user's shell would start it


@dataclass(frozen=True)
class Result:
    """What came of one input; `faults` is empty if it was clean."""

    kind: str
    number: int
    title: str
    arguments: tuple[str, ...]
    faults: tuple[str, ...]
    code: int | None
    cpu: float
    wall: float
    grown: int
    program: bool

    @property
    def id(self) -> str:
        return f"{self.kind}:{self.number}"

    @property
    def clean(self) -> bool:
        return not self.faults

    def to_json(self) -> dict[str, Any]:
        return {"id": self.id, "clean": self.clean, **asdict(self)}


@dataclass
class Campaign:
    """Where a campaign works: a folder of its own, gone afterwards, with the honest world in it."""

    path: Path
    world: World
    seed: int
    _untouched: dict[str, tuple[int, int, int]]

    def try_all(self, inputs: Iterable[tuple[Kind, int]], until: float | None = None) -> Iterator[Result]:
        """Inputs in this order, until a time of `time.monotonic`, if one is given."""
        for kind, number in inputs:
            if until is not None and time.monotonic() > until:
                return
            yield self.try_one(kind, number)

    def try_one(self, kind: Kind, number: int) -> Result:
        return self.attempt(kind, number)[0]

    def attempt(self, kind: Kind, number: int) -> tuple[Result, Ended]:
        """One input, with all that it printed as well."""
        trial, chance = kind.trial(number, self.seed)
        room = Room(self.path / "room", self.world)
        for name in ("", "home", "tmp"):
            (room.path / name).mkdir()
        server = None
        try:
            command = trial.make(room, chance)
            program = command.program or (number % PROGRAMS == PROGRAMS - 1 and not command.twin)
            before = picture(room.path)
            if command.server is not None:
                server, port = forks.serve(command.server, command.limits)
                command = command.but(arguments=[part.replace("{port}", str(port)) for part in command.arguments])
            ended = self._run(command, room, program)
            found = faults(command, room, ended, before, picture(room.path), program)
        finally:
            if server is not None:
                forks.end(server)
            remove(room.path)
        if self._untouched != (now := quick_picture(self.world.path)):
            touched = sorted(path for path in {*now, *self._untouched} if now.get(path) != self._untouched.get(path))
            found.append(f"changed outside of its folder: {', '.join(touched[:3])}")
            raise SystemExit(f"{kind.name}:{number} ({trial.title}) {found[-1]}; the campaign cannot go on")
        result = Result(
            kind.name,
            number,
            trial.title,
            tuple(command.arguments),
            tuple(found),
            ended.code,
            round(ended.cpu, 2),
            round(ended.wall, 2),
            ended.grown,
            program,
        )
        return result, ended

    def _run(self, command: Command, room: Room, program: bool) -> Ended:
        from tercel.cli.app import main

        around = Surroundings.like(command, environment(room, command.environment), room.path / command.folder)
        return forks.run(command.arguments, around, command.limits, None if program else main)


def environment(room: Room, changes: dict[str, str | None]) -> dict[str, str]:
    """A plain environment without a network; `changes` win (None removes)."""
    values: dict[str, str | None] = {
        "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "HOME": str(room.path / "home"),
        "TMPDIR": str(room.path / "tmp"),
        "LANG": "C.UTF-8",
        "COLUMNS": "200",
        "TERM": "xterm-256color",
        "TORCHINDUCTOR_CACHE_DIR": str(room.path / "home" / ".cache" / "torch"),
        **OFFLINE,
        **changes,
    }
    return {name: value for name, value in values.items() if value is not None}


OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_DEACTIVATE_ASYNC_LOAD": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


@contextmanager
def campaign(seed: int) -> Iterator[Campaign]:
    """Import all there is, make the world, and clean up afterwards."""
    warm_up()
    with tempfile.TemporaryDirectory(prefix="tercel-attack-") as folder:
        path = Path(folder).resolve()
        world = make_world(path / "world")
        gc.collect()
        gc.freeze()  # what is shared with the children stays shared
        yield Campaign(path, world, seed, quick_picture(world.path))


def warm_up() -> None:
    """Import what commands import, so that children need not; compute nothing (see `forks`)."""
    os.environ.update(OFFLINE)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "critical")  # as the command line sets it before it imports
    import importlib
    import pkgutil

    import torch

    torch.set_num_threads(1)
    import tercel

    for module in pkgutil.walk_packages(tercel.__path__, "tercel."):
        importlib.import_module(module.name)
    for name in ("llama.modeling_llama", "auto.modeling_auto", "auto.tokenization_auto"):
        importlib.import_module(f"transformers.models.{name}")
    for name in ("tokenization_utils_tokenizers", "modeling_gguf_pytorch_utils", "generation.utils"):
        importlib.import_module(f"transformers.{name}")


def order(kinds: Sequence[Kind], quick: bool) -> list[tuple[Kind, int]]:
    """All inputs of a campaign; kinds in turn, each spread over the whole, so that one cut short saw them all."""
    numbered = [(kind, kind.numbers(quick)) for kind in kinds]
    places = [
        ((at + 0.5) / len(numbers), index, number)
        for index, (_, numbers) in enumerate(numbered)
        for at, number in enumerate(numbers)
    ]
    return [(kinds[index], number) for _, index, number in sorted(places)]


def endless(kinds: Sequence[Kind], start: dict[str, int], step: int = 1) -> Iterator[tuple[Kind, int]]:
    """Every `step`th further number of every kind that has them, for as long as somebody asks."""
    open_ended = [kind for kind in kinds if kind.further is not None]
    number = 0
    while open_ended:
        for kind in open_ended:
            yield kind, start[kind.name] + number
        number += step


def line(result: Result) -> str:
    mark = "ok  " if result.clean else "FAIL"
    return f"{mark} {result.id:<18} {result.wall:5.1f} s  {result.title}" + (
        "" if result.clean else f"\n     {summary(result.faults)}"
    )
