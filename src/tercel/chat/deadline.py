"""Foreign code in this thread that must not run for ever, nor fill the memory: it is interrupted by an exception."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

POLL = 0.02  # seconds
AGAIN = 0.5  # until the exception is raised once more, where it came at a moment at which Python drops exceptions


class DeadlineError(Exception):
    """The block took too much time or memory; raised inside it, between two of Python's own instructions."""


@contextmanager
def deadline(seconds: float, growth: int) -> Iterator[None]:
    """Raise `DeadlineError` inside the block, in whatever thread it runs, when it has taken `seconds`, or while it runs
    the process has grown by `growth` bytes (where the system tells).

    A single operation in C, such as one huge multiplication, is not interrupted; blocks do not nest.
    """
    _watcher.begin(seconds, growth)
    try:
        yield
    finally:
        _watcher.end()


@dataclass
class _Block:
    until: float
    growth: int
    size: int | None = None  # of the process at the first look: asking costs as much as a short block


class _Watcher:
    """One thread that looks at all blocks: starting one for each would cost more than most blocks do."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks: dict[int, _Block] = {}  # by thread
        self._thread: threading.Thread | None = None

    def begin(self, seconds: float, growth: int) -> None:
        with self._lock:
            self._blocks[threading.get_ident()] = _Block(time.monotonic() + seconds, growth)
            if self._thread is None or not self._thread.is_alive():  # a fork has no threads
                self._thread = threading.Thread(target=self._watch, name="tercel-deadline", daemon=True)
                self._thread.start()

    def end(self) -> None:
        while True:
            try:
                with self._lock:
                    self._blocks.pop(threading.get_ident(), None)
                _raise_in(threading.get_ident(), None)  # one that came too late to be raised within the block
                return
            except DeadlineError:  # raised here: the block has ended in time after all
                continue

    def _watch(self) -> None:
        while True:
            time.sleep(POLL)
            with self._lock:
                for thread, block in list(self._blocks.items()):
                    size = _process_bytes()
                    block.size = size if block.size is None else block.size
                    if time.monotonic() > block.until or size > block.size + block.growth:
                        block.until, block.size = time.monotonic() + AGAIN, size
                        _raise_in(thread, DeadlineError)


_watcher = _Watcher()


def _raise_in(thread: int, error: type[Exception] | None) -> None:
    """Have `error` raised in a thread at its next instruction; None takes back one that was not raised yet."""
    raised = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), raised)


def _process_bytes() -> int:
    """What the process holds in memory; 0 where the system does not tell this way."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
