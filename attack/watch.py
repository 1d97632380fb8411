"""What lies in a folder, to see afterwards what a command did to it."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

Picture = Mapping[str, str]
LARGE = 8 << 20  # of larger files only both ends are compared


def picture(folder: Path) -> dict[str, str]:
    """Everything below `folder` by its path: what it is, its permissions, and (of files) what is in it."""
    seen: dict[str, str] = {}
    for where, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = os.path.join(where, name)
            seen[os.path.relpath(path, folder)] = _described(path)
    return seen


def quick_picture(folder: Path) -> dict[str, tuple[int, int, int]]:
    """As `picture`, for folders that nothing should write to: by size, time and node alone."""
    seen = {}
    for where, _, files in os.walk(folder):
        for name in files:
            found = os.lstat(os.path.join(where, name))
            seen[os.path.join(where, name)] = (found.st_size, found.st_mtime_ns, found.st_ino)
    return seen


def differences(before: Picture, after: Picture, allowed: Iterable[str] = ()) -> list[str]:
    """What appeared, vanished or changed, but for paths that are, or lie below, one of `allowed`."""
    free = tuple(allowed)
    found = []
    for path in sorted({*before, *after}):
        if any(path == place or path.startswith(f"{place}/") for place in free):
            continue
        if path not in after:
            found.append(f"{path} is gone")
        elif path not in before:
            found.append(f"{path} appeared")
        elif before[path] != after[path]:
            found.append(f"{path} was {before[path]}, is {after[path]}")
    return found


def _described(path: str) -> str:
    found = os.lstat(path)
    mode = f"{stat.S_IMODE(found.st_mode):o}"
    if stat.S_ISLNK(found.st_mode):
        return f"link to {os.readlink(path)}"
    if stat.S_ISREG(found.st_mode):
        return f"file {mode} {found.st_size} {_digest(path, found.st_size)}"
    if stat.S_ISDIR(found.st_mode):
        return f"folder {mode}"
    return f"{'pipe' if stat.S_ISFIFO(found.st_mode) else 'device'} {mode} {found.st_rdev}"


def _digest(path: str, size: int) -> str:
    digest = hashlib.blake2b(digest_size=8)
    with open(path, "rb") as stream:
        digest.update(stream.read(LARGE))
        if size > LARGE:
            stream.seek(max(LARGE, size - LARGE))
            digest.update(stream.read(LARGE))
    return digest.hexdigest()
