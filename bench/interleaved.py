"""Several engines answer the same questions in turn: every one of them question `i` before any of them `i + 1`.

While one answers, the processes of all others are paused. What the machine did beside it is measured too. Linux only.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from engine_process import EngineProcess
from line_protocol import Answer, Question

from tercel.errors import TercelError

WARM_UP_TOKENS = 96  # graphs are compiled for sizes that came some ten times
_STAT = Path("/proc/stat")
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Asked:
    """A question of a task; `id` is its name there."""

    task: str
    id: str
    question: Question


@dataclass(frozen=True)
class Round:
    """One question and the answers of those that were still running."""

    asked: Asked
    answers: Mapping[str, Answer]


@dataclass
class Quiet:
    """How quiet the machine was while answers were made, in seconds of processor time.

    asked: all that there was; others: spent by processes that are none of this measurement; stolen: by other machines
    on the same hardware; paused: by peers that were paused, which has to be next to nothing.
    """

    asked: float = 0.0
    others: float = 0.0
    stolen: float = 0.0
    paused: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        whole = self.asked or 1.0
        return {"others_share": self.others / whole, "stolen_share": self.stolen / whole, "paused_s": self.paused}


class Interleaved:
    """Engines by name, started one after the other; to be closed.

    One that cannot be started, or fails later, is left out from then on: `failed` says why.
    """

    def __init__(
        self, starters: Mapping[str, Callable[[], EngineProcess]], warm_up: Question, say: Callable[[str], None]
    ):
        self._say, self._asked = say, 0
        self._running: dict[str, EngineProcess] = {}
        self._cpu: dict[str, float] = {}  # of a paused process
        self.quiet = Quiet()
        self.failed: dict[str, str] = {}
        self.about: dict[str, dict[str, Any]] = {}
        try:
            for name, start in starters.items():
                self._start(name, start, replace(warm_up, max_new_tokens=WARM_UP_TOKENS))
        except BaseException:
            self.close()
            raise

    def rounds(self, questions: Sequence[Asked]) -> Iterator[Round]:
        """Who begins changes from question to question."""
        for asked in questions:
            names = list(self._running)
            first = self._asked % len(names) if names else 0
            self._asked += 1
            answers = {}
            for name in names[first:] + names[:first]:
                answer = self._ask(name, asked.question)
                if answer is not None:
                    answers[name] = answer
                    self._say(f"{asked.task} {asked.id}, {name}: {len(answer.tokens) / answer.seconds:.1f} tokens/s")
            yield Round(asked, answers)

    def close(self) -> None:
        for name in list(self._running):
            self._end(name)

    def _start(self, name: str, start: Callable[[], EngineProcess], warm_up: Question) -> None:
        began = time.perf_counter()
        self._say(f"{name} is started …")
        try:
            process = start()
        except TercelError as error:
            self._fail(name, error)
            return
        self._running[name] = process
        self.about[name] = {
            "version": process.version,
            "settings": process.settings,
            "start_s": time.perf_counter() - began,
        }
        self.quiet.paused[name] = 0.0
        try:
            process.ask(warm_up)
        except TercelError as error:
            self._fail(name, error)
            return
        self._pause(name)

    def _ask(self, name: str, question: Question) -> Answer | None:
        process, cores = self._running[name], os.cpu_count() or 1
        self.quiet.paused[name] += process.cpu_seconds() - self._cpu[name]
        process.resume()
        began, busy, stolen = time.perf_counter(), *_machine()
        own = process.cpu_seconds() + time.process_time()
        try:
            answer = process.ask(question)
        except TercelError as error:
            self._fail(name, error)
            return None
        busy_now, stolen_now = _machine()
        self._pause(name)
        own = self._cpu[name] + time.process_time() - own
        self.quiet.asked += (time.perf_counter() - began) * cores
        self.quiet.others += max(0.0, busy_now - busy - own)
        self.quiet.stolen += stolen_now - stolen
        return answer

    def _pause(self, name: str) -> None:
        process = self._running[name]
        process.pause()
        self._cpu[name] = process.cpu_seconds()
        self.about[name]["peak_mb"] = process.peak_bytes() / 1e6

    def _fail(self, name: str, error: TercelError) -> None:
        self.failed[name] = str(error)
        self._say(f"{name} is left out: {error}")
        self._end(name)

    def _end(self, name: str) -> None:
        process = self._running.pop(name, None)
        if process is not None:
            process.close()


def _machine() -> tuple[float, float]:
    """Seconds that all processors together have worked, and that were stolen from them, since the machine started."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, _STAT.read_text("utf-8").split()[1:9])
    return (user + nice + system + irq + softirq) / _TICKS, steal / _TICKS
