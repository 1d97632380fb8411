"""Each input in a process of its own, for little: forked from one that has imported everything already.

Importing PyTorch and transformers takes seconds, a fork some milliseconds. The parent imports, never starts a thread
(a fork copies only the thread that asks for it, so locks held by others would stay held for ever; `run` checks this
each time) and never runs a command itself: all that a command does to the state of Python, and every crash, dies with
its child. A child

* leads a session, so that whatever it starts ends with it;
* has limits of address space, processor time, file size and core dumps, which the kernel keeps;
* has its own working folder, environment, standard input and, as asked, pipes or terminals for its output, which the
  parent reads as it comes, up to a limit, and which stand for themselves even if the child is killed;
* runs the command line's own `main`, or, as a *program*, becomes a new interpreter that does (the same limits hold).

A server that an input talks to is a second child, with the same limits.
"""

from __future__ import annotations

import contextlib
import os
import pty
import select
import signal
import socket
import sys
import time
import traceback
import tty
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from attack.child import Limits, Surroundings, become, limit


@dataclass(frozen=True)
class Ended:
    """How a process ended. code: None where a signal ended it. grown: bytes of its highest resident memory beyond the
    parent's; cpu, wall: seconds. stopped: why the parent ended it, if it did."""

    code: int | None
    signal: int | None
    out: bytes
    err: bytes
    cpu: float
    wall: float
    grown: int
    stopped: str = ""


@dataclass
class _Stream:
    """The parent's end of a pipe or terminal."""

    fd: int
    limit: int
    hang_up: int | None = None
    kept: bytearray = field(default_factory=bytearray)
    open: bool = True

    def read(self) -> bool:
        """Take what is there; False once the limit is passed."""
        try:
            block = os.read(self.fd, 1 << 16)
        except OSError:  # how a terminal says that the other end is closed
            block = b""
        self.kept += block
        if not block or (self.hang_up is not None and len(self.kept) >= self.hang_up):
            self.close()
        return len(self.kept) <= self.limit

    def close(self) -> None:
        if self.open:
            os.close(self.fd)
            self.open = False


def in_a_child(work: Callable[[], object], failed: str) -> None:
    """Do work that starts threads, of which this process stays free, and wait for it. Raises `RuntimeError`, which says
    `failed`, if it raises anything."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    if os.waitpid(child, 0)[1] != 0:
        raise RuntimeError(failed)


def run(
    arguments: Sequence[str], around: Surroundings, limits: Limits, main: Callable[[Sequence[str]], None] | None
) -> Ended:
    """Run a command in a child and wait for it; `main` None runs it as a program.

    Raises `RuntimeError` if this process has threads, with which a fork would not be safe.
    """
    _no_threads()
    (out, out_child), (err, err_child) = _pipe(around.terminal), _pipe(around.terminal)
    stdin = _holding(around.stdin)
    started, before = time.monotonic(), _resident()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        become(arguments, around, limits, main, (stdin, out_child, err_child), (out, err))
    for fd in (stdin, out_child, err_child):
        os.close(fd)
    streams = (_Stream(out, limits.output, around.hang_up), _Stream(err, limits.output))
    try:
        stopped = _watch(child, streams, started + limits.wall)
    finally:  # also where this process is interrupted: the child, which leads a session, is not
        _kill(child)
    _, status, used = os.wait4(child, 0)
    _drain(streams, limits)
    return Ended(
        code=os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
        signal=os.WTERMSIG(status) if os.WIFSIGNALED(status) else None,
        out=bytes(streams[0].kept),
        err=bytes(streams[1].kept),
        cpu=used.ru_utime + used.ru_stime,
        wall=time.monotonic() - started,
        grown=max(0, used.ru_maxrss * 1024 - (before if main is not None else 0)),
        stopped=stopped,
    )


def serve(behaviour: Callable[[socket.socket], None], limits: Limits) -> tuple[int, int]:
    """A child that runs `behaviour` on a listening socket of 127.0.0.1; its process id and its port."""
    _no_threads()
    listening = socket.create_server(("127.0.0.1", 0))
    port = int(listening.getsockname()[1])
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            quiet = os.open(os.devnull, os.O_RDWR)
            for fd in (0, 1, 2):
                os.dup2(quiet, fd)
            limit(limits)
            behaviour(listening)
        finally:
            os._exit(0)
    listening.close()
    return child, port


def end(child: int) -> None:
    """End a child of `serve`."""
    _kill(child)
    os.waitpid(child, 0)


# ------------------------------------------------------------------------------------------------ in the parent


def _kill(child: int) -> None:
    for kill in (os.killpg, os.kill):  # the second for one that does not lead a group yet
        with contextlib.suppress(ProcessLookupError):
            kill(child, signal.SIGKILL)


def _no_threads() -> None:
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        raise RuntimeError(f"{threads} threads run here, so that a fork is not safe; import, but compute nothing")


def _pipe(terminal: bool) -> tuple[int, int]:
    """The reader's end and the writer's."""
    if not terminal:
        return os.pipe()
    reader, writer = pty.openpty()
    tty.setraw(writer)  # bytes arrive as they were written
    return reader, writer


def _holding(data: bytes) -> int:
    """A file that lives nowhere but here, open for reading: standard input of any size."""
    fd = os.memfd_create("stdin")
    with open(fd, "wb", closefd=False) as stream:
        stream.write(data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _watch(child: int, streams: Sequence[_Stream], deadline: float) -> str:
    """Read until the child has ended; why it has to be ended otherwise."""
    process = os.pidfd_open(child)
    try:
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                return "out of time"
            ready, _, _ = select.select([process, *(s.fd for s in streams if s.open)], [], [], left)
            for stream in streams:
                if stream.open and stream.fd in ready and not stream.read():
                    return "endless output"
            if process in ready:
                return ""
    finally:
        os.close(process)


def _drain(streams: Sequence[_Stream], limits: Limits) -> None:
    for stream in streams:
        while stream.open and select.select([stream.fd], [], [], 0)[0] and len(stream.kept) <= limits.output:
            stream.read()
        stream.close()


def _resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as stream:
        return int(stream.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
