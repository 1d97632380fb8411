"""Writing one file: whole or not at all, where the user meant it, as it was before in all but its content."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tercel.errors import TercelError
from tercel.file_set import file_set
from tercel.files import atomic_dir, atomic_file, is_stream, require_free, write_json, write_text
from tercel.locks import beside
from tests.full_disk import full_disk


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def device(tmp_path: Path) -> Path:
    """A null device of our own: a test that fails must not take the machine's."""
    path = tmp_path / "null"
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))
        path.write_bytes(b"")
    except (PermissionError, OSError):
        pytest.skip("devices can be made by root alone")
    return path


def test_a_device_is_written_to(device: Path) -> None:
    write_json(device, {"a": 1})
    assert stat.S_ISCHR(device.stat().st_mode)
    assert [p.name for p in device.parent.iterdir()] == ["null"]


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    pipe, got = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: got.append(pipe.read_text()))
    reader.start()
    write_text(pipe, "text\n")
    reader.join()
    assert got == ["text\n"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@pytest.mark.parametrize("name", ["-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
@pytest.mark.parametrize("to", ["pipe", "file"])
def test_standard_output(tmp_path: Path, name: str, to: str) -> None:
    """Also where a redirection made it a plain file, which must not be replaced under what is printed to it."""
    program = (
        "import sys; from pathlib import Path; from tercel.files import write_text\n"
        f"print('before', flush=True); write_text(Path({name!r}), 'text\\n'); print('after')"
    )
    command = [sys.executable, "-c", program]
    if to == "pipe":
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    else:
        with (tmp_path / "log").open("a") as log:
            subprocess.run(command, stdout=log, check=True)
        out = (tmp_path / "log").read_text()
    assert out == "before\ntext\nafter\n"


def test_standard_output_within_a_program(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    write_text(Path("-"), "τ\n")
    assert capsysbinary.readouterr().out == "τ\n".encode()
    assert not Path("-").exists()


def test_a_full_device_is_told() -> None:
    if not is_stream(Path("/dev/full")):
        pytest.skip("there is no /dev/full here")
    with pytest.raises(TercelError, match="writing /dev/full failed: No space left on device"):
        write_text(Path("/dev/full"), "x")


def test_links_stay(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    for name, before in (("there", "old"), ("new", None)):
        real, link = tmp_path / "disk" / name, tmp_path / name
        if before:
            real.write_text(before)
        link.symlink_to(Path("disk") / name)
        write_text(link, "text")
        assert link.is_symlink()
        assert real.read_text() == "text"
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(TercelError, match="loop"):
        write_text(tmp_path / "loop", "x")


def test_modes_stay(tmp_path: Path) -> None:
    for mode in (0o600, 0o640, 0o755):
        file = tmp_path / f"{mode:o}"
        file.write_text("old")
        file.chmod(mode)
        with atomic_file(file) as partial:
            assert mode_of(partial) == 0o600  # nobody may read what the finished file will hide
            partial.write_text("new")
        assert (mode_of(file), file.read_text()) == (mode, "new")
    umask = os.umask(0o027)
    try:
        write_text(tmp_path / "new", "x")
    finally:
        os.umask(umask)
    assert mode_of(tmp_path / "new") == 0o640


def test_owners_stay(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root gives files away")
    file = tmp_path / "file"
    file.write_text("old")
    os.chown(file, 1234, 2345)
    write_text(file, "new")
    assert (file.stat().st_uid, file.stat().st_gid) == (1234, 2345)


def test_what_must_not_be_replaced(tmp_path: Path) -> None:
    fixed = tmp_path / "fixed"
    fixed.write_text("old")
    fixed.chmod(0o444)
    (tmp_path / "folder").mkdir()
    for name, message in (
        ("fixed", "fixed is read-only; make it writable or choose another name"),
        ("folder", "folder is a folder; give the name of a file"),
        ("fixed/below", "cannot write .*fixed/below"),
        ("n" * 300, "File name too long"),
    ):
        with pytest.raises(TercelError, match=message):
            write_text(tmp_path / name, "new")
    assert fixed.read_text() == "old"
    assert {p.name for p in tmp_path.iterdir()} == {"fixed", "folder"}


def test_names_just_short_enough_can_be_written(tmp_path: Path) -> None:
    write_text(tmp_path / ("n" * 255), "x")
    assert [p.name for p in tmp_path.iterdir()] == ["n" * 255]


def stopped(file: Path, error: BaseException) -> None:
    file.write_text("half")
    raise error


@pytest.mark.parametrize(
    ("error", "seen"),
    [(OSError(errno.ENOSPC, "No space left on device"), TercelError), (KeyboardInterrupt(), KeyboardInterrupt)],
)
def test_what_fails_leaves_the_old_file(tmp_path: Path, error: BaseException, seen: type[BaseException]) -> None:
    write_text(tmp_path / "file", "old")
    with pytest.raises(seen), atomic_file(tmp_path / "file") as partial:
        stopped(partial, error)
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"file": "old"}


def test_what_a_killed_process_left_is_swept_by_the_next(tmp_path: Path) -> None:
    file = tmp_path / "file"
    for what in ("part", "lock"):
        beside(file, what).write_text("12")
    write_text(file, "new")
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"file": "new"}


def test_two_at_once_wait_for_each_other(tmp_path: Path) -> None:
    file, begun = tmp_path / "file", threading.Event()

    def slowly() -> None:
        with atomic_file(file) as partial:
            begun.set()
            partial.write_text("first")

    one = threading.Thread(target=slowly)
    one.start()
    begun.wait()
    write_text(file, "second")
    one.join()
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"file": "second"}


def test_a_folder_of_the_cache_is_whole_or_absent(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "one"
    left = beside(folder, "part")
    left.mkdir(parents=True)
    (left / "rest").write_text("of a killed process")
    with pytest.raises(KeyboardInterrupt), atomic_dir(folder) as partial:
        stopped(partial / "a", KeyboardInterrupt())
    assert list(folder.parent.iterdir()) == []
    with atomic_dir(folder) as partial:
        (partial / "a").write_text("a")
    assert {p.name for p in folder.parent.iterdir()} == {"one"}
    assert [p.name for p in folder.iterdir()] == ["a"]


def test_what_is_free(tmp_path: Path) -> None:
    require_free(tmp_path / "new")
    require_free(Path("-"))
    require_free(Path("/dev/null"))
    (tmp_path / "dangling").symlink_to("nowhere")
    for name, message in ((".", "exists already"), ("dangling", "exists already"), ("n" * 300, "name too long")):
        with pytest.raises(TercelError, match=message):
            require_free(tmp_path / name)


@pytest.mark.parametrize("kind", ["file", "folder of the cache", "file set"])
def test_tensors_that_the_disk_has_no_room_for(tmp_path: Path, kind: str) -> None:
    """The safetensors library has an error of its own for that."""

    path = tmp_path / "out"
    writing = {"file": atomic_file, "folder of the cache": atomic_dir, "file set": lambda at: file_set(at, "head")}
    told = pytest.raises(TercelError, match=rf"^writing {path} failed: .*os error.*; free space or")
    with full_disk(1000), told, writing[kind](path) as partial:
        save_file({"a": torch.zeros(1000)}, partial if kind == "file" else partial / "a.safetensors")
    assert not [found.name for found in tmp_path.iterdir() if not found.name.endswith(".lock")]
