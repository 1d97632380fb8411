"""Heads of several methods, named in one file:

    # heads.yaml
    medusa: runs/medusa/best
    eagle3-top-layer: {method: eagle3, head: runs/top/best, tree: 10x8x60}

A name is a method's, or one of your own with the method that drafts. Folders are looked for beside the file first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tercel import limits
from tercel.errors import TercelError
from tercel.reading import UnreadableError, check_json, no_text, read_text, short

_KEYS = ("method", "head", "tree")
_FORM = "write NAME: FOLDER, or NAME: {method: METHOD, head: FOLDER, tree: SHAPE}"


@dataclass(frozen=True)
class Entry:
    """method: a proposer's name; head: as HEAD on the command line, None for the target's shipped one; tree: as of
    `--tree`, None for what that says."""

    method: str
    head: str | None = None
    tree: str | None = None


def read_manifest(path: Path) -> dict[str, Entry]:
    """The entries of a YAML or JSON file by name. Raises `TercelError` if it cannot be read or has another form."""
    try:
        text = read_text(path, limits.JSON_BYTES)
        values = yaml.safe_load(text)
        check_json(values, text)
    except (OSError, UnicodeDecodeError, UnreadableError) as error:
        reason = getattr(error, "strerror", None) or error
        raise TercelError(f"cannot read {path}: {reason}; give a file that names heads by method") from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        line = " ".join(str(error).split())[:200]
        raise TercelError(f"{path} is neither YAML nor JSON ({line}); {_FORM}") from error
    if not isinstance(values, dict) or not values:
        raise TercelError(f"{path} names no heads; {_FORM}")
    return {str(name): _entry(path, name, value) for name, value in values.items()}


def as_manifest(entries: Mapping[str, Entry]) -> dict[str, Any]:
    """What a file of these entries holds."""
    return {
        name: {key: getattr(entry, key) for key in _KEYS if getattr(entry, key) is not None}
        for name, entry in entries.items()
    }


def _entry(path: Path, name: Any, value: Any) -> Entry:
    where = f"{path}: {short(name)}"
    if not isinstance(name, str) or not name or "," in name or no_text(name):
        raise TercelError(f"{where} is no name of a method; {_FORM}")
    if isinstance(value, str):
        value = {"head": value}
    if not isinstance(value, dict) or not all(isinstance(text, str) and text for text in value.values()):
        raise TercelError(f"{where} is {short(value)}; {_FORM}")
    if unknown := [key for key in value if key not in _KEYS]:
        raise TercelError(f"{where} has {short(unknown[0])}, which means nothing here; {_FORM}")
    head = value.get("head")
    if head is not None and (beside := path.parent / Path(head).expanduser()).is_dir():
        head = str(beside)
    return Entry(value.get("method", name), head, value.get("tree"))
