"""Wheels that pip accepts, in a folder that stands for the package index."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

import pytest

from tercel import wheels
from tercel.files import sha256_file
from tercel.wheels import Wheel


def make_wheel(folder: Path, name: str, member: str, data: bytes, version: str = "1.0") -> Wheel:
    """A wheel that pip accepts, with one member besides its metadata."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = name.replace("-", "_")
    file = folder / f"{stem}-{version}-py3-none-any.whl"
    info = f"{stem}-{version}.dist-info"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(member, data)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return Wheel(f"{name}=={version}", sha256_file(file), file.stat().st_size, member)


def use_index(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let `folder` stand for the package index, for pip itself."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return folder


def copy_instead(index: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let downloads be copies from the index folder, without pip; gives the names asked for, in order."""
    asked: list[str] = []

    def copy(wheel: Wheel, folder: Path, on_bytes: wheels.OnBytes | None = None) -> Path:
        asked.append(wheel.requirement)
        stem = wheel.requirement.replace("-", "_").replace("==", "-")
        return Path(shutil.copy(index / f"{stem}-py3-none-any.whl", folder))

    monkeypatch.setattr(wheels, "download", copy)
    return asked
