"""Text and JSON from outside: whatever is wrong with them ends as a clause that a sentence can be made of."""

from __future__ import annotations

import io
import json
import os
import re
from pathlib import Path
from typing import IO, Any

from tercel import limits
from tercel.errors import TercelError

# what is worth a closer look: the escape of a lone surrogate (or of a pair), a number of many digits
_SUSPICIOUS = re.compile(rf"\\u[dD][89a-fA-F]|\d{{{limits.JSON_DIGITS},}}")


class UnreadableError(Exception):
    """What is wrong with a text, as a clause without its place."""


def parse_json(text: str) -> Any:
    """The value of `text`. Raises `UnreadableError` if it is no JSON, or one that nothing here could go on with."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        at = f"column {error.colno}" if error.lineno == 1 else f"line {error.lineno}, column {error.colno}"
        raise UnreadableError(f"not JSON ({error.msg}, {at})") from error
    except RecursionError as error:
        raise UnreadableError(_TOO_DEEP) from error
    except ValueError as error:  # Python refuses to convert thousands of digits
        raise UnreadableError(_TOO_LONG) from error
    check_json(value, text)
    return value


_TOO_DEEP = f"JSON nested more than {limits.JSON_DEPTH} deep"
_TOO_LONG = f"a number of more than {limits.JSON_DIGITS} digits"


def check_json(value: Any, source: str) -> None:
    """Raises `UnreadableError` for a value nested too deep, an enormous number, or a string that is not text.

    source: the text it was read from (or one that it is a part of), which mostly shows that there is nothing to find.
    """
    if source.count("[") + source.count("{") <= limits.JSON_DEPTH and not _SUSPICIOUS.search(source):
        return
    level = [value]
    for _ in range(limits.JSON_DEPTH + 1):
        deeper: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                deeper += item.keys()
                deeper += item.values()
            elif isinstance(item, list):
                deeper += item
            elif isinstance(item, str):
                if problem := no_text(item):
                    raise UnreadableError(f"a string that is not text: {problem}")
            elif isinstance(item, int) and abs(item) >= 10**limits.JSON_DIGITS:
                raise UnreadableError(_TOO_LONG)
        if not deeper:
            return
        level = deeper
    raise UnreadableError(_TOO_DEEP)


def no_text(text: str) -> str | None:
    """Why `text` cannot be written as UTF-8; None if it can."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"character {error.start + 1} is {text[error.start]!a}, a lone surrogate or a byte outside UTF-8"
    return None


def as_text(text: str) -> str:
    """`text` as it can be written: bytes of a path outside UTF-8, which Python keeps as halves of characters, become
    `\\udce9`."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def check_utf8(path: Path) -> None:
    """Raises `TercelError` for a path with a byte outside UTF-8: safetensors opens no such file."""
    if no_text(str(path)):
        raise TercelError(f"the path {path} has a byte outside UTF-8, and weights cannot be kept there; rename it")


def short(value: Any) -> str:
    """A value as it is shown in a sentence: of one that is long, the beginning."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:79]}…"


def check_text(text: str, what: str) -> str:
    """`text` itself. Raises `TercelError` if it cannot be written as UTF-8; `what` names it in the sentence."""
    if problem := no_text(text):
        raise TercelError(f"{what} is not text: {problem}; remove it")
    return text


def read_bytes(path: Path, most: int) -> bytes:
    """The file's bytes, also of a device or a pipe. Raises `OSError`, and `UnreadableError` if there are more than
    `most` (devices tell no size, and some have no end)."""
    with path.open("rb") as stream:
        return bounded(stream, most)


def bounded(stream: IO[bytes], most: int) -> bytes:
    """All that is left of a stream. Raises as `read_bytes`."""
    data = stream.read(most + 1)
    if len(data) > most:
        raise UnreadableError(f"it has more than {most / (1 << 20):.3g} MiB")
    return data


def read_text(path: Path, most: int) -> str:
    """The file as UTF-8 text, its line ends as `\\n`. Raises as `read_bytes`, and `UnicodeDecodeError`."""
    return io.StringIO(read_bytes(path, most).decode("utf-8"), newline=None).getvalue()


def read_json(path: Path, advice: str = "save or fetch the head again") -> dict[str, Any]:
    """The object in the file; raises `TercelError` if there is none, or the file is enormous."""
    try:
        value = parse_json(read_text(path, limits.JSON_BYTES))
    except (OSError, UnicodeDecodeError, UnreadableError) as error:
        reason = getattr(error, "strerror", None) or error
        raise TercelError(f"{path} cannot be read as JSON ({reason}); {advice}") from error
    if not isinstance(value, dict):
        raise TercelError(f"{path} holds a {type(value).__name__}, not an object; {advice}")
    return value


def check_readable(folder: Path) -> None:
    """Raises `TercelError` for a folder whose entries cannot be listed, or whose weights cannot be opened."""
    check_utf8(folder)
    try:
        os.listdir(folder)
    except OSError as error:
        raise TercelError(f"cannot read the folder {folder}: {error.strerror or error}; check its rights") from error


def read_shards(index: Path) -> dict[str, str]:
    """Which tensor is in which file, by an index of shards.

    Raises `TercelError` for an index that is none, and for files that are missing or lie outside of its folder. A link
    out of the folder is followed only where the Hub's cache keeps its files that way, within the same repository.
    """
    places = read_json(index, "save or fetch it again").get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(place, str) for place in places.values()):
        raise TercelError(f"{index} has no weight_map from tensors to files; save or fetch it again")
    folder = index.parent
    own = [folder.resolve()]
    if folder.parent.name == "snapshots":
        own.append(folder.parent.parent.resolve() / "blobs")
    for name in sorted(set(places.values())):
        plain = name not in ("", ".", "..") and not re.search(r"[/\\\0]", name)
        if not plain or (folder / name).resolve().parent not in own:
            raise TercelError(f"{index} names the file {name!r} outside of its folder; do not trust it")
        if not os.path.isfile(folder / name):
            raise TercelError(f"{index} names {name}, which is missing; fetch the whole folder again")
    return places
