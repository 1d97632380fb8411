"""One process at a time: locks that the system drops together with the process that held them."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from tercel.errors import TercelError

OURS = ".tercel-"  # how the names begin of all that this package puts beside a user's files
FOLDER_LOCK = f"{OURS}lock"
PATIENCE = 3600.0  # seconds: the largest model over a slow line
_NO_LOCKS_HERE = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)


def beside(path: Path, what: str) -> Path:
    """The hidden name beside `path` for something that belongs to it; short however long `path`'s own name is."""
    digest = hashlib.sha256(os.fsencode(path.name)).hexdigest()[:12]
    return path.with_name(f"{OURS}{digest}.{what}")


@contextmanager
def one_at_a_time(lock: Path, path: Path, *, wait: float = 0.0) -> Iterator[None]:
    """Hold the file `lock`, which stands for writing `path`, and remove it at the end. wait: in seconds.

    Raises `TercelError` if another process holds it all the while, or `lock` cannot be made.
    """
    held = FileLock(lock)
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        held.acquire(timeout=wait)
    except Timeout as error:
        if not lock.exists():  # a place where no file can be made looks taken as well
            raise TercelError(f"cannot write {path}: no file can be made there; choose another place") from error
        raise TercelError(
            f"{path} is being written by another process{_holder(lock)}; wait for it, or choose another place"
        ) from error
    except OSError as error:
        if error.errno not in _NO_LOCKS_HERE:
            raise TercelError(f"cannot write {path}: {error.strerror or error}; choose another place") from error
        yield  # a file system without locks: nothing can be promised there
        return
    try:
        with suppress(OSError):
            lock.write_text(f"{os.getpid()}\n", encoding="ascii")
        yield
    finally:
        with suppress(OSError):
            lock.unlink()  # whoever waits sees that its file has gone, and takes a new one
        held.release()


@contextmanager
def made_once(path: Path) -> Iterator[None]:
    """Wait while another process makes `path`, a thing of the cache; to be asked afterwards whether it is there."""
    with one_at_a_time(beside(path, "lock"), path, wait=PATIENCE):
        yield


def _holder(lock: Path) -> str:
    """` (process 123)`, as far as the lock file tells."""
    try:
        return f" (process {int(lock.read_text(encoding='ascii'))})"
    except (OSError, ValueError):
        return ""


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Hold `folder` for this process; it is made if it is missing, and goes again if nothing is put into it.

    Raises `TercelError` if another process holds it, it is a file, or cannot be written.
    """
    real = Path(os.path.realpath(folder))
    made = not os.path.exists(real)
    try:
        real.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise TercelError(f"{folder} is a file; choose another place") from error
    except OSError as error:
        raise TercelError(f"cannot write {folder}: {error.strerror or error}; choose another place") from error
    try:
        with one_at_a_time(real / FOLDER_LOCK, folder):
            yield
    finally:
        if made:
            with suppress(OSError):
                real.rmdir()
