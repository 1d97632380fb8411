"""Panics of the tokenizers' Rust code: an error like any other, told once and by this package alone."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import IO

_holding: IO[bytes] | None = None  # the file of the main thread's block, if it is in one


@contextmanager
def guarded(*, hush: bool = False) -> Iterator[None]:
    """Turn a panic, which is no `Exception` (and has no type to be named by), into a `RuntimeError`; an interruption by
    the user or the interpreter passes.

    hush: what the library writes to standard error about its panic is dropped. That is for short blocks: whatever else
    is written there meanwhile appears when the block ends. A block within another costs next to nothing.
    """
    with _held_back() if hush else nullcontext() as held:
        start = 0 if held is None else held.seek(0, os.SEEK_END)
        try:
            yield
        except BaseException as error:
            if type(error).__module__ != "pyo3_runtime":
                raise
            if held is not None:
                held.seek(held.truncate(start))
            raise RuntimeError(str(error) or "it panicked") from error


@contextmanager
def _held_back() -> Iterator[IO[bytes] | None]:
    """Hold back in a file, which is yielded, what is written to file descriptor 2, and give it out at the end.

    Rust reports a panic there before Python hears of it, and no setting turns that off. The descriptor belongs to the
    whole process, so that only its main thread exchanges it, for the outermost block; in a server's other threads
    nothing is held back, nor where the descriptor is closed, or there is no place for a file.
    """
    global _holding
    if _holding is not None and threading.current_thread() is threading.main_thread():
        yield _holding
        return
    with ExitStack() as stack:
        held: IO[bytes] | None = None
        if threading.current_thread() is threading.main_thread():
            with suppress(OSError):
                standard = os.dup(2)
                stack.callback(os.close, standard)
                held = stack.enter_context(_scratch_file())
        if held is None:
            yield None
            return
        try:
            os.dup2(held.fileno(), 2)
            _holding = held
            yield held
        finally:
            _holding = None
            os.dup2(standard, 2)
            _give_out(held)


def _scratch_file() -> IO[bytes]:
    """In memory where that can be: a block is a matter of microseconds then."""
    if sys.platform == "linux":
        return open(os.memfd_create("stderr"), "w+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)


def _give_out(held: IO[bytes]) -> None:
    held.seek(0)
    left = memoryview(held.read())
    with suppress(OSError):  # nobody listens any more
        while left:
            left = left[os.write(2, left) :]
