"""How work is asked to stop that can go on later: by Ctrl-C, or by SIGTERM of whoever runs it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

BOTH = (signal.SIGINT, signal.SIGTERM)


class Terminated(KeyboardInterrupt):
    """SIGTERM came. What keeps its work when Ctrl-C is pressed keeps it then too."""


def stopped(stop: KeyboardInterrupt, sentence: str) -> KeyboardInterrupt:
    """The interruption `stop` with what to tell the user of it."""
    return Terminated(sentence) if isinstance(stop, Terminated) else KeyboardInterrupt(sentence)


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM raises `Terminated` in this block, unless somebody else handles it."""
    if not _is_main() or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold Ctrl-C and SIGTERM back until the block ends: neither half an update nor half a save may stay."""
    if not _is_main():
        yield
        return
    held: list[int] = []
    # those that interrupt; one that is ignored, or ends the process at once, is left alone
    previous = {number: handler for number in BOTH if callable(handler := signal.getsignal(number))}
    for number in previous:
        signal.signal(number, lambda number, _frame: held.append(number))
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if held:
        raise Terminated if signal.SIGTERM in held else KeyboardInterrupt


def _is_main() -> bool:
    """Whether this is the thread in which signals arrive."""
    return threading.current_thread() is threading.main_thread()


def _terminate(_number: int, _frame: FrameType | None) -> NoReturn:
    raise Terminated
