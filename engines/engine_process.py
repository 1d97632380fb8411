"""An engine that runs in a process of its own, in its own environment, and is asked line by line (`line_protocol.py`).

It can be paused, all its threads at once: what an idle engine's workers do (many spin for a while) then costs the
others nothing, and each keeps the waiting policy that is fastest for it. Linux only.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from line_protocol import Answer, Job, Question

from tercel.errors import TercelError

START_SECONDS, ANSWER_SECONDS = 900, 900
_PROC = Path("/proc")
_TICKS = os.sysconf("SC_CLK_TCK")


class EngineProcess:
    """Started and loaded; to be closed. `version` and `settings` are what the driver tells of the engine.

    The driver leads a group of processes, which are paused and counted together. If this process dies, so do they.
    Raises `TercelError` if it cannot be loaded, and from `ask` if it fails; its output is in `log`.
    """

    def __init__(self, name: str, command: Sequence[str | Path], job: Job, log: Path, env: Mapping[str, str]) -> None:
        self.name, self.log = name, log
        with log.open("w", encoding="utf-8") as stream:
            self._process = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                env=dict(env),
                text=True,
                process_group=0,
            )
        try:
            told = self._exchange(job, START_SECONDS)
        except BaseException:
            self.close()
            raise
        self.version: str = told["version"]
        self.settings: dict[str, Any] = told["settings"]

    def ask(self, question: Question) -> Answer:
        return Answer(**self._exchange(asdict(question), ANSWER_SECONDS))

    def pause(self) -> None:
        """Returns when its threads rest."""
        self._signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def cpu_seconds(self) -> float:
        """Spent by the processes of its group so far, in ticks of the kernel's clock."""
        return sum(int(fields[11]) + int(fields[12]) for fields in self._stats()) / _TICKS

    def peak_bytes(self) -> int:
        """The most memory that its processes have held, each at its own time."""
        peak = 0
        for fields in self._stats():
            lines = (_PROC / fields[-1] / "status").read_text("utf-8").splitlines()
            peak += next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:")), 0)
        return peak

    def close(self) -> None:
        """Ends it: by the end of its input, or else by force."""
        self.resume()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()
        self._process.stdout.close()

    def _exchange(self, message: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        expired = threading.Event()

        def end() -> None:
            expired.set()
            self._signal(signal.SIGKILL)

        alarm = threading.Timer(seconds, end)
        alarm.start()
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            alarm.cancel()
        if expired.is_set():
            raise TercelError(f"{self.name} gave no answer within {seconds:.0f} s; its output is in {self.log}")
        if not line:
            raise TercelError(f"{self.name} ended with code {self._process.wait()}; its output is in {self.log}")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise TercelError(f"{self.name} failed: {reply['error']}; its output is in {self.log}")
        return reply

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # it has ended
            os.killpg(self._process.pid, number)

    def _stats(self) -> Iterator[list[str]]:
        """For every process of the group the fields of its `stat` from the state on, and its id behind them."""
        for entry in _PROC.iterdir():
            if not entry.name.isdigit():
                continue
            try:
                fields = (entry / "stat").read_text("utf-8").rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
                continue
            if int(fields[2]) == self._process.pid:
                yield [*fields, entry.name]
