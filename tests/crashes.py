"""Kills at every point where a command touches the disk: in a fork, which ends there as a killed process does.

A point is a call that changes the file system (open for writing, rename, unlink, mkdir, fsync, and what torch and
safetensors write). The process ends just before it. Where a file has just been written or is about to be flushed,
half of it is cut away first: what was not flushed need not have reached the disk.
"""

from __future__ import annotations

import builtins
import io
import os
import shutil
import signal
import stat
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import safetensors.torch
import torch

Job = Callable[[], object]
KILLED = 137
PATIENCE = 120  # seconds
_CALLS = ("replace", "rename", "unlink", "remove", "mkdir", "rmdir", "truncate", "link", "symlink", "chmod")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


@dataclass(frozen=True)
class Scenario:
    """A command whose kill is tried. All are given a folder of their own.

    prepare: what is there before. job: the command; it must be ready to be run again. after_kill, after_all: raise what
    is wrong after the kill, and when the job was run again; the latter also gets the folder of an undisturbed run.
    """

    prepare: Callable[[Path], object]
    job: Callable[[Path], object]
    after_kill: Callable[[Path], object]
    after_all: Callable[[Path, Path], object]


def crash_points(scenario: Scenario, folder: Path, *, most: int | None = None) -> tuple[int, int]:
    """Kill the scenario's job at its points, each time in a new place; returns how many were tried, of how many.

    most: try no more than so many points, evenly spread, the first and the last among them.
    Raises `AssertionError` for the first point after which something is wrong.
    """
    whole = folder / "whole"
    whole.mkdir(parents=True)
    scenario.prepare(whole)
    points = count_points(lambda: scenario.job(whole))
    scenario.after_all(whole, whole)
    tried = _spread(points, most)
    for point in tried:
        place = folder / f"point-{point}"
        place.mkdir()
        scenario.prepare(place)
        ended = in_a_fork(lambda place=place: scenario.job(place), point)
        assert ended == KILLED, f"point {point} of {points} was not reached ({ended})"
        try:
            scenario.after_kill(place)
            again = in_a_fork(lambda place=place: scenario.job(place))
            assert again == 0, f"the same command again ended with {again}"
            scenario.after_all(place, whole)
        except Exception as error:
            raise AssertionError(f"killed at point {point} of {points}, in {place}: {error}") from error
        shutil.rmtree(place)
    return len(tried), points


def _spread(points: int, most: int | None) -> Sequence[int]:
    if most is None or most >= points:
        return range(1, points + 1)
    return sorted({1 + round(i * (points - 1) / (most - 1)) for i in range(most)})


def count_points(job: Job) -> int:
    """How many points a whole run of `job` passes."""
    reader, writer = os.pipe()

    def counted() -> None:
        counter = _Points(None)
        job()
        os.write(writer, str(counter.passed).encode())

    ended = in_a_fork(counted)
    os.close(writer)
    with os.fdopen(reader, "rb") as answer:
        told = answer.read()
    assert ended == 0, "the command failed without being killed"
    return int(told)


def in_a_fork(job: Job, point: int | None = None) -> int:
    """The exit status of `job`, killed at its `point`-th point if one is given; 1 if it raised."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        _child(job, point)
    until = time.monotonic() + PATIENCE
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise AssertionError(f"the command hung for {PATIENCE} s")
        time.sleep(0.005)
    return os.waitstatus_to_exitcode(ended[1])


def _child(job: Job, point: int | None) -> NoReturn:
    status = 1
    try:
        torch.set_num_threads(1)  # the parent's other threads are not here
        if point is not None:
            _Points(point)
        job()
        status = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)


class _Points:
    """Wraps what changes the file system, for the rest of this process; ends it at the `last`-th call."""

    def __init__(self, last: int | None) -> None:
        self.passed, self.last = 0, last
        self.flushed: dict[int, int] = {}  # sizes of files that were on the disk, by inode
        self.truncate = os.truncate
        for name in _CALLS:
            setattr(os, name, self._before(getattr(os, name)))
        fsync = self._before(os.fsync, self._halve_open)
        os.fsync = lambda handle: (fsync(handle), self._note_flushed(handle))[0]
        os.open = self._before(os.open, writes=lambda path, flags, *_a, **_k: bool(flags & _WRITING))
        opening = self._before(io.open, writes=lambda file, mode="r", *_a, **_k: not set(mode).isdisjoint("wax+"))
        builtins.open = io.open = opening
        from tercel.draft import checkpoint
        from tercel.interop.engines import weights
        from tercel.train import feature_store

        for module in (checkpoint, weights, feature_store, safetensors.torch):
            module.save_file = self._after(module.save_file)  # type: ignore[attr-defined]
        torch.save = self._after(torch.save)

    def _pass(self, *, before_the_end: Callable[[], object] = lambda: None) -> None:
        self.passed += 1
        if self.passed == self.last:
            before_the_end()
            os._exit(KILLED)

    def _before(
        self,
        call: Callable[..., Any],
        damage: Callable[..., object] = lambda *_a, **_k: None,
        writes: Callable[..., bool] = lambda *_a, **_k: True,
    ) -> Callable[..., Any]:
        def wrapped(*args: Any, **more: Any) -> Any:
            if writes(*args, **more):
                self._pass(before_the_end=lambda: damage(*args))
            return call(*args, **more)

        return wrapped

    def _after(self, save: Callable[..., Any]) -> Callable[..., Any]:
        """Of a function that writes the file named by its second argument, as much is left as a kill leaves."""

        def wrapped(value: Any, path: Any, *args: Any, **more: Any) -> Any:
            done = save(value, path, *args, **more)
            self._pass(before_the_end=lambda: self.truncate(path, os.stat(path).st_size // 2))
            return done

        return wrapped

    def _halve_open(self, handle: int) -> None:
        """Of what was not flushed before, half."""
        status = os.fstat(handle)
        if stat.S_ISREG(status.st_mode):
            kept = min(self.flushed.get(status.st_ino, 0), status.st_size)  # an inode may be another file's by now
            self.truncate(f"/proc/self/fd/{handle}", kept + (status.st_size - kept) // 2)

    def _note_flushed(self, handle: int) -> None:
        status = os.fstat(handle)
        self.flushed[status.st_ino] = status.st_size
