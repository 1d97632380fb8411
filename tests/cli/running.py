"""Run `tercel` as a user does: in this process, or as a program of its own."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from typer.testing import CliRunner

from tercel.cli.app import app


@dataclass(frozen=True)
class Ended:
    """How a command ended: exit code, standard output, standard error."""

    code: int
    out: str
    err: str


def run(*arguments: str, stdin: str | bytes | None = None) -> Ended:
    """In this process; an exception that is not an exit is raised."""
    environment = {"COLUMNS": "200", "NO_COLOR": "1"}
    result = CliRunner().invoke(
        app, arguments, input=stdin, env=environment, catch_exceptions=False, prog_name="tercel"
    )
    return Ended(result.exit_code, result.stdout, result.stderr)


def run_program(*arguments: str, stdin: str | None = None) -> Ended:
    """As a program, through the console script's own entry."""
    program = "from tercel.cli.app import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        input=stdin or "",
        capture_output=True,
        text=True,
        timeout=120,
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def everything(folder: Path) -> dict[str, bytes]:
    """Every file below a folder with its content: to see that nothing was written, or what was."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def refused(ended: Ended, *parts: str) -> str:
    """Assert that a command ended with code 2 and one sentence on standard error that has all of `parts`."""
    assert ended.code == 2, (ended.code, ended.out, ended.err)
    lines = ended.err.strip().splitlines()
    assert len(lines) == 1, ended.err
    assert "Traceback" not in ended.err
    for part in parts:
        assert part in lines[0], (part, lines[0])
    return lines[0]
