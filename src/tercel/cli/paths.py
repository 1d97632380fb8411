"""Paths as they are typed, and commands as a shell takes them."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from tercel.errors import TercelError


def user_path(typed: str | Path) -> Path:
    """The path, `~` and `~user` as the home they stand for: a shell leaves them alone in `--out=~/x`, and YAML does.

    Every option that takes a path has this as its parser. Raises `TercelError` if there is no such home, and for what
    can be no path.
    """
    text = str(typed)
    if "\0" in text:
        raise TercelError(f"{text!r} holds a NUL character, so it cannot be a path; give another")
    expanded = os.path.expanduser(text)
    if expanded.startswith("~"):
        raise TercelError(f"no home is known for the first part of {text}; write the path out, or ./~… for a file here")
    return Path(expanded)


def user_name(typed: str) -> str:
    """A name or a path; as `user_path` if it begins with `~`, else as it is."""
    return str(user_path(typed)) if typed.startswith("~") else typed


def user_names(typed: str) -> str:
    """Several of them with commas between."""
    return ",".join(map(user_name, typed.split(",")))


def tercel_command(*words: str) -> str:
    """A command line of this program, quoted for a POSIX shell."""
    return shlex.join(["tercel", *words])
