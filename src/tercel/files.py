"""Files that are whole or absent: everything is written under a temporary name, flushed to the disk, and renamed."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from tercel.errors import TercelError
from tercel.locks import beside, one_at_a_time
from tercel.reading import as_text, check_utf8

STDOUT = Path("-")
WAIT = 60.0  # seconds for another process that writes the very same file
UNWRITTEN = (OSError, SafetensorError)  # what comes of a full disk


def cache_dir() -> Path:
    """Folder for things that can be made again: `$XDG_CACHE_HOME/tercel`, by default `~/.cache/tercel`.

    Raises `TercelError` where there is none and none can be made.
    """
    base = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    if base.startswith("~"):  # as in a container whose user has neither HOME nor an entry in passwd
        raise TercelError("this user has no home folder; set XDG_CACHE_HOME to a folder that can be written")
    folder = Path(base) / "tercel"
    check_utf8(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TercelError(
            f"cannot keep a cache in {folder}: {error.strerror or error}; set XDG_CACHE_HOME to a folder that can be "
            "written"
        ) from error
    return folder


@contextmanager
def atomic_file(path: Path, *, durable: bool = True, held: bool = False) -> Iterator[Path]:
    """Yield a temporary path beside `path`; it takes the place of `path` when the block ends without an error.

    A link is followed: it stays, and what it points to is replaced; the mode and owner of a file stay too. Into what
    is no plain file (a device, a pipe, `-` for standard output) the finished bytes are written instead. durable:
    wait until the disk has them, so that a power cut leaves the old file or the new one. held: the caller keeps other
    processes from writing there, so that no lock is needed.
    Raises `TercelError` if `path` is a folder, is read-only, or cannot be written.
    """
    if is_stream(path):
        with tempfile.TemporaryDirectory() as scratch:
            whole = Path(scratch) / "whole"
            whole.touch()
            yield whole
            _pour(whole, path)
        return
    real = Path(os.path.realpath(path))
    refuse_unwritable(real, path)
    try:
        real.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TercelError(f"cannot write {path}: {error.strerror or error}; choose another place") from error
    partial = beside(real, "part")
    with nullcontext() if held else one_at_a_time(beside(real, "lock"), path, wait=WAIT):
        try:
            partial.unlink(missing_ok=True)  # what a killed process left there
            os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))  # nobody else's until it is whole
        except OSError as error:
            raise TercelError(f"cannot write {path}: {error.strerror or error}; choose another place") from error
        try:
            yield partial
            take_over(partial, real)
            if durable:
                sync(partial)
            os.replace(partial, real)
            if durable:
                sync(real.parent)
        except UNWRITTEN as error:
            raise TercelError(unwritten(path, error)) from error
        finally:
            partial.unlink(missing_ok=True)


@contextmanager
def atomic_dir(path: Path) -> Iterator[Path]:
    """Yield a temporary folder beside `path`, a folder of the cache that does not exist yet; it becomes `path` when
    the block ends without an error. Whoever may be one of several takes `one_at_a_time` around it.
    """
    partial = beside(path, "part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)  # of a killed process
        partial.mkdir()
    except OSError as error:
        raise TercelError(f"cannot write {path}: {error.strerror or error}; choose another place") from error
    try:
        yield partial
        for file in partial.iterdir():
            sync(file)
        os.rename(partial, path)
        sync(path.parent)
    except UNWRITTEN as error:
        raise TercelError(unwritten(path, error)) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def unwritten(path: Path, error: BaseException) -> str:
    """The sentence for one of `UNWRITTEN`."""
    reason = getattr(error, "strerror", None) or error
    return f"writing {path} failed: {reason}; free space or choose another place"


def is_stream(path: Path) -> bool:
    """Whether `path` is written to and never replaced: `-`, a device, a pipe, or an open file under /dev or /proc
    (which a redirection may have made a plain one).
    """
    if path == STDOUT:
        return True
    step = Path(os.path.abspath(path))
    for _ in range(40):  # as many links as the system follows
        if step.is_relative_to("/dev/fd") or step.is_relative_to("/proc"):
            return os.path.exists(step)
        if not os.path.islink(step):
            break
        step = Path(os.path.abspath(step.parent / os.readlink(step)))
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _pour(whole: Path, path: Path) -> None:
    """Copy the finished file into a stream."""
    try:
        with whole.open("rb") as source:
            if path == STDOUT:
                sys.stdout.flush()
                shutil.copyfileobj(source, sys.stdout.buffer)
                sys.stdout.buffer.flush()
                return
            with path.open("ab") as out:
                shutil.copyfileobj(source, out)
    except BrokenPipeError:  # the reader has gone, which is its right
        raise
    except OSError as error:
        raise TercelError(f"writing {path} failed: {error.strerror or error}; choose another place") from error


def require_free(path: Path) -> None:
    """Raises `TercelError` if there is a file or folder at `path`; a stream is always free."""
    if not is_stream(path) and _kind(path) is not None:
        raise TercelError(f"{path} exists already; remove it or choose another name")


def refuse_unwritable(real: Path, path: Path) -> None:
    """Raises `TercelError` if `real`, which the user calls `path`, is a folder or a read-only file."""
    mode = _kind(real)
    if mode is None:
        return
    if stat.S_ISDIR(mode):
        raise TercelError(f"{path} is a folder; give the name of a file")
    if not mode & (stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH) or not os.access(real, os.W_OK):
        raise TercelError(f"{path} is read-only; make it writable or choose another name")


def _kind(path: Path) -> int | None:
    """The mode of what is at `path`, without following a link; None if nothing is."""
    try:
        return os.lstat(path).st_mode
    except FileNotFoundError:
        return None
    except OSError as error:
        raise TercelError(f"cannot write {path}: {error.strerror or error}; choose another place") from error


def take_over(partial: Path, real: Path) -> None:
    """Give the file `partial` the mode and owner of the file that it will replace, or those of a new one."""
    try:
        before = os.stat(real)
    except FileNotFoundError:
        _share_as_usual(partial)
        return
    with suppress(PermissionError):  # only root gives files away
        os.chown(partial, before.st_uid, before.st_gid)
    partial.chmod(stat.S_IMODE(before.st_mode))


def _share_as_usual(path: Path) -> None:
    """Give a file the permissions that a new one would have."""
    umask = os.umask(0)
    os.umask(umask)
    path.chmod(0o666 & ~umask)


def sync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, have reached the disk."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except PermissionError:  # a folder on Windows, which writes names through by itself
        return
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):  # a file system that cannot
            raise
    finally:
        os.close(handle)


def require_room(folder: Path, size: int) -> None:
    """Raises `TercelError` if the file system of `folder` has less than `size` bytes left."""
    usage = shutil.disk_usage(folder)
    if usage.total and usage.free < size:
        raise TercelError(
            f"{folder} needs room for {size / 1e6:,.0f} MB, but the disk has {usage.free / 1e6:,.0f} MB left; "
            "free space or choose another --out"
        )


def write_text(path: Path, text: str, *, held: bool = False) -> None:
    with atomic_file(path, held=held) as partial:
        put_text(partial, text)


def put_text(file: Path, text: str) -> None:
    """Write a file of a set, or one that takes its place later, as UTF-8 (`as_text`)."""
    file.write_text(as_text(text), encoding="utf-8")


def write_json(path: Path, value: Any, *, held: bool = False) -> None:
    write_text(path, as_json(value), held=held)


def as_json(value: Any) -> str:
    """The text of a JSON file, for people to read too."""
    return _HALF.sub(_written, json.dumps(value, indent=2, ensure_ascii=False)) + "\n"


def as_json_line(value: Any) -> str:
    """A line of a JSONL file."""
    return _HALF.sub(_written, json.dumps(value, ensure_ascii=False)) + "\n"


_HALF = re.compile("[\ud800-\udfff]")


def _written(half: re.Match[str]) -> str:
    """As `as_text` has it, in a JSON string."""
    return as_text(half[0]).replace("\\", "\\\\")


def sha256_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
