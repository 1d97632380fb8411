"""What an input is: files laid into an empty folder, and a command about them."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Literal

from attack.child import Limits, Manner
from attack.forks import Ended
from attack.world import World

Must = Literal["either", "refuse", "run"]
Check = Callable[["Room", Ended], str | None]


@dataclass(frozen=True)
class Room:
    """The empty folder of one input, and the honest things to make it from."""

    path: Path
    world: World

    def copy(self, source: Path, name: str | None = None) -> Path:
        """A copy of a file or folder of the world."""
        to = self.path / (name or source.name)
        if source.is_dir():
            shutil.copytree(source, to)
        else:
            shutil.copy2(source, to)
        return to

    def write(self, name: str, content: bytes | str) -> Path:
        """A file of this content (text as UTF-8, lone surrogates as they are)."""
        to = self.path / name
        to.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
        return to


@dataclass(frozen=True)
class Command(Manner):
    """arguments: of `tercel`; `{port}` stands for that of `server`. out: paths below the room that the command may
    write (with everything below them). must: whether it has to refuse the input, has to take it, or may do either.
    codes: exit codes that may come of it, beside 2 for a refusal. check: says what is wrong with the result of a
    command that ended with 0. leaves: a refusal may leave things at `out` (a run that can be resumed). answer: standard
    output is the model's own text. program: as a program even where inputs usually are not. The rest is as in
    `Manner`."""

    arguments: Sequence[str]
    out: Sequence[str] = ()
    must: Must = "either"
    codes: frozenset[int] = frozenset({0})
    check: Check | None = None
    leaves: bool = False
    answer: bool = False
    server: Callable[[socket.socket], None] | None = None
    environment: dict[str, str | None] = field(default_factory=dict)
    folder: str = ""
    program: bool = False
    limits: Limits = field(default_factory=Limits)

    def but(self, **changes: object) -> Command:
        return replace(self, **changes)  # type: ignore[arg-type]


Make = Callable[[Room, Random], Command]


@dataclass(frozen=True)
class Trial:
    """One input: a few words about it, and what lays it out."""

    title: str
    make: Make


@dataclass(frozen=True)
class Kind:
    """A surface that is attacked. trials: those written by hand; further numbers are made by `further`, from a random
    state of their own (None: there are none). count: how many a full campaign tries. quick: how many of those written
    by hand, spread evenly, and of the further ones a quick one tries."""

    name: str
    about: str
    trials: Sequence[Trial]
    further: Callable[[Random], Trial] | None = None
    count: int = 0
    quick: tuple[int, int] = (6, 4)

    def trial(self, number: int, seed: int) -> tuple[Trial, Random]:
        """Input `number` and the random state to make it with; the same for the same seed, whatever came before."""
        chance = Random(f"{seed}:{self.name}:{number}")
        if number < len(self.trials):
            return self.trials[number], chance
        if self.further is None:
            raise IndexError(f"{self.name} has inputs 0..{len(self.trials) - 1}")
        return self.further(chance), chance

    def numbers(self, quick: bool) -> list[int]:
        """What a campaign tries of this kind."""
        total = len(self.trials)
        if not quick:
            return list(range(max(total, self.count if self.further else total)))
        by_hand, further = min(self.quick[0], total), self.quick[1] if self.further else 0
        return [i * total // by_hand for i in range(by_hand)] + [total + i for i in range(further)]


def remove(folder: Path) -> None:
    """Even what was made unreadable."""
    for where, folders, _ in os.walk(folder):
        for name in folders:
            path = os.path.join(where, name)
            if not os.path.islink(path):
                os.chmod(path, 0o755)
    shutil.rmtree(folder, ignore_errors=True)
