"""Draft heads that come with the package, one folder for each target that has one."""

from __future__ import annotations

from pathlib import Path

from tercel.errors import TercelError


def available() -> tuple[str, ...]:
    """The targets that have a shipped head, by the names `tercel` knows them under."""
    return tuple(sorted(file.parent.name for file in Path(__file__).parent.glob("*/tercel.json")))


def shipped(alias: str) -> Path | None:
    """The folder of the head shipped for the target `alias`, or None if there is none."""
    name = alias.lower()
    return Path(__file__).parent / name if name in available() else None


def resolve_head(name: str | None, target_name: str) -> Path:
    """The folder of the head that is meant: one on disk, a shipped one, or (None) the target's shipped one.

    Raises `TercelError` if there is no such head.
    """
    wanted = target_name if name is None else name
    if name is not None and Path(name).expanduser().is_dir():
        return Path(name).expanduser()
    if (folder := shipped(wanted)) is not None:
        return folder
    names = available()
    known = f", or the name of a target with a shipped head ({', '.join(names)})" if names else ""
    if name is None:
        raise TercelError(
            f"no head is shipped for {target_name}; give HEAD, the folder that `tercel train` made for it"
        )
    raise TercelError(f"there is no head {name}; give a folder that `tercel train` made{known}")
