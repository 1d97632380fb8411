"""Wheels that pip accepts."""

from __future__ import annotations

import zipfile
from pathlib import Path

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
