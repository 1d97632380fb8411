"""Files that are whole or absent: everything is written to a temporary name and renamed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tercel.errors import TercelError


def cache_dir() -> Path:
    """Folder for things that can be made again: `$XDG_CACHE_HOME/tercel`, by default `~/.cache/tercel`.

    Raises `TercelError` where there is none and none can be made.
    """
    base = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    if base.startswith("~"):  # as in a container whose user has neither HOME nor an entry in passwd
        raise TercelError("this user has no home folder; set XDG_CACHE_HOME to a folder that can be written")
    folder = Path(base) / "tercel"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TercelError(
            f"cannot keep a cache in {folder}: {error.strerror or error}; set XDG_CACHE_HOME to a folder that can be "
            "written"
        ) from error
    return folder


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; rename it over `path` when the block ends without an error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
        os.close(handle)
    except OSError as error:
        raise TercelError(f"cannot write {path}: {error.strerror or error}; choose another place") from error
    partial = Path(name)
    try:
        yield partial
        share_as_usual(partial)  # mkstemp makes files that only their owner can read
        os.replace(partial, path)
    except OSError as error:
        reason = error.strerror or error
        raise TercelError(f"writing {path} failed: {reason}; free space or choose another place") from error
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def atomic_dir(path: Path, keep: Sequence[str] = ()) -> Iterator[Path]:
    """Yield a temporary folder beside `path`; it takes the place of `path` when the block ends without an error.

    A folder that was at `path` is removed only after the new one is complete; its entries named in `keep` move over.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent))
        partial.chmod(0o755)
    except OSError as error:
        raise TercelError(f"cannot write {path}: {error.strerror or error}; choose another place") from error
    try:
        yield partial
        old = partial.with_suffix(".old")
        if path.exists():
            os.rename(path, old)
            for name in keep:
                if (old / name).exists():
                    os.rename(old / name, partial / name)
        os.rename(partial, path)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        reason = error.strerror or error
        raise TercelError(f"writing {path} failed: {reason}; free space or choose another place") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def share_as_usual(path: Path) -> None:
    """Give a file the permissions that a new one would have."""
    umask = os.umask(0)
    os.umask(umask)
    path.chmod(0o666 & ~umask)


def write_text(path: Path, text: str) -> None:
    with atomic_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def sha256_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
