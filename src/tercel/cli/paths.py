"""Paths as they are typed, and commands as a shell takes them."""

from __future__ import annotations

import shlex
from pathlib import Path

from tercel.errors import TercelError


def user_path(typed: str | Path) -> Path:
    """The path, `~` and `~user` as the home they stand for: a shell leaves them alone in `--out=~/x`, and YAML does.

    Every option that takes a path has this as its parser. Raises `TercelError` if there is no such home, and for what
    can be no path.
    """
    if "\0" in str(typed):
        raise TercelError(f"{str(typed)!r} holds a NUL character and can be no path; give another")
    try:
        return Path(typed).expanduser()
    except RuntimeError as error:
        raise TercelError(f"no home is known for the first part of {typed}; write the path out, or ./~…") from error


def user_name(typed: str) -> str:
    """A name or a path; as `user_path` if it begins with `~`, else as it is."""
    return str(user_path(typed)) if typed.startswith("~") else typed


def user_names(typed: str) -> str:
    """Several of them with commas between."""
    return ",".join(map(user_name, typed.split(",")))


def tercel_command(*words: str) -> str:
    """A command line of this program, quoted for a POSIX shell."""
    return shlex.join(["tercel", *words])
