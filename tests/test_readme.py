"""The README's commands: every `tercel …` in it is one that the command line takes, and blocks under the
marker `<!-- run -->` are run as they stand, with a shell, in an empty folder."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
import typer

from tercel.cli.app import app
from tercel.target_model.wheels import BUILTIN

README = Path(__file__).parent.parent / "README.md"
FENCE = re.compile(
    r"(?P<marker><!-- run -->\s*\n)?^```(?:bash|console|sh)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL
)
ENDS_A_COMMAND = frozenset("|&;<>()")


@dataclass(frozen=True)
class Block:
    """A fenced block of shell: its commands, one a line, and whether they are to be run."""

    lines: tuple[str, ...]
    run: bool

    @property
    def script(self) -> str:
        return "\n".join(self.lines)


def blocks(text: str) -> Iterator[Block]:
    """Shell blocks of a Markdown text; in a console session only the lines after a `$ ` are commands."""
    for match in FENCE.finditer(text):
        lines = match["body"].replace("\\\n", " ").splitlines()
        if any(line.startswith("$ ") for line in lines):
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        kept = tuple(line for line in lines if line.strip() and not line.lstrip().startswith("#"))
        yield Block(kept, match["marker"] is not None)


def tercel_commands(line: str) -> Iterator[list[str]]:
    """Arguments of every `tercel` that a shell line runs, whatever pipes and redirections stand around it."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="".join(ENDS_A_COMMAND))
    lexer.whitespace_split = True
    command: list[str] = []
    for token in [*lexer, ";"]:
        if not set(token) <= ENDS_A_COMMAND:
            command.append(token)
            continue
        if command and command[0] in ("tercel", ".venv/bin/tercel"):
            yield command[1:]
        command = []


def parse(arguments: list[str]) -> None:
    """Let every verb on the way read its arguments, and call none. Raises what a user would be told."""
    command, name = typer.main.get_command(app), "tercel"
    context = None
    while True:
        context = command.make_context(name, arguments, parent=context)
        rest = [*context._protected_args, *context.args]
        if not hasattr(command, "resolve_command") or not rest:
            return
        name, command, arguments = command.resolve_command(context, rest)


COMMANDS = [
    arguments
    for block in blocks(README.read_text("utf-8"))
    for line in block.lines
    for arguments in tercel_commands(line)
]
SCRIPTS = [block.script for block in blocks(README.read_text("utf-8")) if block.run]
PYTHON = re.findall(r"<!-- run -->\s*\n```python\n(.*?)^```$", README.read_text("utf-8"), re.MULTILINE | re.DOTALL)


def marked(script: str) -> list[pytest.MarkDecorator]:
    """Scripts with a built-in target fetch it: they run the real thing."""
    return [pytest.mark.real] if any(name in script for name in BUILTIN) or "tercel demo" in script else []


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_commands_are_what_the_command_line_takes(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for flag, value in pairwise(arguments):
        if flag == "--config":
            Path(value).write_text("{}", encoding="utf-8")
    parse(arguments)


@pytest.mark.parametrize("script", [pytest.param(s, marks=marked(s), id=s.split("\n")[0]) for s in SCRIPTS])
def test_blocks_to_be_run(script: str, tmp_path: Path) -> None:
    succeeds(["bash", "-euo", "pipefail", "-c", script], tmp_path)


@pytest.mark.real
@pytest.mark.parametrize("script", PYTHON)
def test_python_to_be_run(script: str, tmp_path: Path) -> None:
    assert len(succeeds([sys.executable, "-c", script], tmp_path).split()) > 10


def succeeds(command: list[str], folder: Path) -> str:
    """Run a command as a user would, in an empty folder; returns what it printed."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


SAMPLE = """
```bash
# a remark
tercel train smollm2-135m --data a.jsonl --data b.jsonl \\
    --out runs/head
echo 'a | b' | tercel generate smollm2-135m > out.txt
```
<!-- run -->
```console
$ tercel --version && ls
tercel 0.1.0
```
```python
tercel = 1
```
"""


def test_reading_a_readme() -> None:
    first, second = blocks(SAMPLE)
    assert (first.run, second.run) == (False, True)
    assert [len(first.lines), second.script] == [2, "tercel --version && ls"]
    train, generate = (next(tercel_commands(line)) for line in first.lines)
    assert train == ["train", "smollm2-135m", "--data", "a.jsonl", "--data", "b.jsonl", "--out", "runs/head"]
    assert generate == ["generate", "smollm2-135m"]
    parse(train)
    parse(generate)


@pytest.mark.parametrize(
    "wrong", ["trian x", "train x", "generate x y z", "bench x --task demo", "data shwo a", "data show a"]
)
def test_a_wrong_command_would_be_noticed(wrong: str) -> None:
    with pytest.raises(typer.BadParameter.__mro__[1]):  # typer's usage error, which it does not export
        parse(wrong.split())
