"""Files that are replaced together: all or none, only one's own, finished or swept by whoever comes next."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tercel import file_set as module
from tercel.errors import TercelError
from tercel.file_set import (
    MANIFEST,
    STAGING,
    damaged,
    file_set,
    interrupted,
    read_manifest,
    read_set,
    remove_set,
    settle,
)
from tercel.locks import FOLDER_LOCK, folder_lock
from tests.cli.running import everything


def write(folder: Path, kind: str | None = "export", **texts: str) -> None:
    with file_set(folder, kind) as staging:
        for name, text in texts.items():
            (staging / f"{name}.txt").write_text(text)


def content(folder: Path) -> dict[str, str]:
    return {name: data.decode() for name, data in everything(folder).items() if name != MANIFEST}


def test_a_set_replaces_the_one_before_and_nothing_else(tmp_path: Path) -> None:
    write(tmp_path, a="1", b="1")
    (tmp_path / "mine.txt").write_text("mine")
    write(tmp_path, b="2", c="2")
    assert content(tmp_path) == {"b.txt": "2", "c.txt": "2", "mine.txt": "mine"}
    write(tmp_path, None, c="3", d="3")  # a part of it
    assert content(tmp_path) == {"b.txt": "2", "c.txt": "3", "d.txt": "3", "mine.txt": "mine"}
    assert set(read_set(tmp_path)) == {"b.txt", "c.txt", "d.txt"}
    remove_set(tmp_path)
    assert everything(tmp_path) == {"mine.txt": b"mine"}


def test_what_is_in_the_way_is_not_replaced(tmp_path: Path) -> None:
    write(tmp_path, a="1")
    (tmp_path / "b.txt").write_text("mine")
    (tmp_path / "c.txt").mkdir()
    (tmp_path / "d.txt").symlink_to("nowhere")
    before = everything(tmp_path)
    for name in "bcd":
        with pytest.raises(TercelError, match=f"holds a {name}.txt that tercel did not write there"):
            write(tmp_path, a="2", **{name: "2"})
    with pytest.raises(TercelError, match="holds other output of tercel"):
        write(tmp_path, "head", a="2")
    (tmp_path / "a.txt").chmod(0o444)
    with pytest.raises(TercelError, match=r"a\.txt is read-only"):
        write(tmp_path, a="2")
    assert everything(tmp_path) == before


def test_modes_stay(tmp_path: Path) -> None:
    write(tmp_path, a="1")
    (tmp_path / "a.txt").chmod(0o600)
    write(tmp_path, a="2")
    assert (tmp_path / "a.txt").stat().st_mode & 0o777 == 0o600


def stop(at: int, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Fail the `at`-th rename into place."""
    replace, calls = os.replace, []

    def failing(source: object, target: object) -> None:
        if STAGING in str(source):
            calls.append(source)
            if len(calls) == at:
                raise error
        replace(source, target)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "replace", failing)


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()])
def test_half_replaced_is_finished_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    write(tmp_path, a="1", b="1", gone="1")
    seen = TercelError if isinstance(error, OSError) else KeyboardInterrupt
    with monkeypatch.context() as patch:
        stop(2, patch, error)
        with pytest.raises(seen, match="the same command again finishes it" if seen is TercelError else None):
            write(tmp_path, a="2", b="2")
    assert interrupted(tmp_path)
    settle(tmp_path)
    assert content(tmp_path) == {"a.txt": "2", "b.txt": "2"}
    assert damaged(tmp_path) == []


def test_a_manifest_that_was_not_replaced_means_the_old_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, a="1", b="1")
    before = everything(tmp_path)

    def full(*_: object, **__: object) -> None:
        raise TercelError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(module, "write_json", full)
        with pytest.raises(TercelError, match="No space"):
            write(tmp_path, a="2", b="2")
        with pytest.raises(TercelError, match="No space"):
            write(tmp_path / "new", a="2")
    assert everything(tmp_path) == before
    assert not (tmp_path / "new").exists()


def test_leftovers_of_a_kill_are_swept(tmp_path: Path) -> None:
    write(tmp_path, a="1")
    (tmp_path / STAGING).mkdir()
    (tmp_path / STAGING / "a.txt").write_text("half")
    settle(tmp_path)
    assert content(tmp_path) == {"a.txt": "1"}


def test_damage_is_seen(tmp_path: Path) -> None:
    assert damaged(tmp_path) == [MANIFEST]
    write(tmp_path, a="1", b="1", c="1")
    (tmp_path / "a.txt").write_text("2")
    (tmp_path / "b.txt").unlink()
    assert damaged(tmp_path) == ["a.txt", "b.txt"]


@pytest.mark.parametrize(
    "manifest",
    [
        "{",
        "[]",
        "null",
        "[" * 100_000,
        '{"kind": "export", "files": ["a"], "gone": {}, "shared": []}',
        '{"kind": "export", "files": {}, "gone": {}, "shared": [1]}',
        '{"kind": "export", "files": {"a": "x"}, "gone": {"../mine.txt": "x"}, "shared": []}',
        '{"kind": "export", "files": {"/etc/passwd": "x"}, "gone": {}, "shared": []}',
        '{"kind": 1, "files": {}, "gone": {}, "shared": []}',
    ],
)
def test_a_manifest_from_elsewhere_is_not_trusted(tmp_path: Path, manifest: str) -> None:
    """It comes along when a folder is copied, so it may hold anything."""
    (tmp_path / MANIFEST).write_text(manifest)
    assert read_manifest(tmp_path) is None
    (tmp_path / STAGING).mkdir()
    settle(tmp_path)
    assert set(everything(tmp_path)) == {MANIFEST}


def test_a_folder_is_held_by_one_process_and_free_when_that_is_killed(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from tercel.locks import folder_lock\n"
        "with folder_lock(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    folder = tmp_path / "run"
    other = subprocess.Popen(
        [sys.executable, "-c", program, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None
    assert other.stdout.readline() == "held\n"
    with pytest.raises(TercelError, match=rf"run is being written by another process \(process {other.pid}\)"):
        folder_lock(folder).__enter__()
    other.kill()
    other.communicate()
    assert (folder / FOLDER_LOCK).exists()
    with folder_lock(folder):
        (folder / "a").write_text("mine")
    assert [p.name for p in folder.iterdir()] == ["a"]


def test_the_manifest_can_be_read_by_people(tmp_path: Path) -> None:
    write(tmp_path, a="1")
    assert json.loads((tmp_path / MANIFEST).read_text()) == {
        "format": 1,
        "kind": "export",
        "files": {"a.txt": "6b86b273ff34fce19d6b804eff5a3f5747ada4eaa22f1d49c01e52ddb7875b4b"},
        "gone": {},
        "shared": [],
    }
