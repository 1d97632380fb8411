"""Kills: commands ended at every point where they touch the disk, then given again (`tests/crash_scenarios.py`)."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from attack.forks import in_a_child


@dataclass(frozen=True)
class Killed:
    """name: of what was killed. tried: points, of `points` in all, each killed once and gone on with. fault: what was
    wrong after the first kill that was not survived; "" if all were."""

    name: str
    tried: int
    points: int
    fault: str = ""


def kill_all(folder: Path, most: int | None = None, part: int = 0, parts: int = 1) -> Iterator[Killed]:
    """Every scenario, each in a child of its own, since making its world starts threads; `most` points of each. Of
    several parts only the scenarios of `part`."""
    folder.mkdir()
    for name in _answer_of(folder / "names.json", lambda: sorted(_scenarios()))[part::parts]:
        yield Killed(**_answer_of(folder / "killed.json", partial(_kill, name, folder, most)))


def _scenarios() -> dict[str, Any]:
    from tests.crash_scenarios import SCENARIOS

    return dict(SCENARIOS)


def _kill(name: str, folder: Path, most: int | None) -> dict[str, Any]:
    from tests.crashes import crash_points

    try:
        tried, points = crash_points(_scenarios()[name], folder / name.replace(" ", "-"), most=most)
    except AssertionError as error:
        return asdict(Killed(name, 0, 0, f"{' '.join(str(error).split())} {_where(error)}"))
    return asdict(Killed(name, tried, points))


def _where(error: AssertionError) -> str:
    """The line that found something wrong: an assertion often says no more."""
    cause = error.__cause__ or error
    frame = traceback.extract_tb(cause.__traceback__)[-1]
    return f"({type(cause).__name__} at {Path(frame.filename).name}:{frame.lineno}: {frame.line})"


def _answer_of(answer: Path, work: Callable[[], Any]) -> Any:
    """What `work` gives, as JSON through a file. Raises `RuntimeError` if it failed."""
    in_a_child(lambda: answer.write_text(json.dumps(work()), encoding="utf-8"), "a kill could not be tried")
    return json.loads(answer.read_text("utf-8"))
