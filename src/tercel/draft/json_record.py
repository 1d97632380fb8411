"""Objects of a JSON file as frozen dataclasses: read with a sentence for what is wrong, written as they were found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Any, Self, get_args, get_origin, get_type_hints

from tercel.errors import TercelError

ADVICE = "save or fetch the head again"
_WORDS = {str: "text", int: "a whole number", float: "a number"}


@dataclass(frozen=True, kw_only=True)
class JsonRecord:
    """Base of what a file says of one thing; the annotations of its fields are the form of the file.

    An entry may be text, a number (a float may be a whole one), a list of one form (`tuple`), another record, or an
    object of any names (`dict`). A field with a default may be missing in the file. One without has to be there, and
    may be null where its type has None: not known.
    unknown: entries that no field names, as they are. order: the names of all entries as they were found, so that a
    file that is read and written again stays as it was.
    """

    unknown: Mapping[str, Any] = field(default_factory=dict)
    order: tuple[str, ...] = field(default=(), compare=False, repr=False)

    @classmethod
    def of(cls, entries: Mapping[str, Any]) -> Self:
        """From entries that are right."""
        names = {f.name for f in _entries_of(cls)}
        known = {name: value for name, value in entries.items() if name in names}
        unknown = {name: value for name, value in entries.items() if name not in names}
        return cls(**known, unknown=unknown, order=tuple(entries))

    @classmethod
    def from_json(cls, value: Any, place: str, path: Path) -> Self:
        """From what the file `path` has at `place`. Raises `TercelError` for an entry of another form than the
        field's, and for a missing one."""
        if not isinstance(value, dict):
            _refuse(value, "an object", place, path)
        kinds, read = get_type_hints(cls), dict(value)
        missing = sorted(f.name for f in _entries_of(cls) if f.default is MISSING and f.name not in value)
        if missing:
            raise TercelError(f"{place} in {path} has no {missing[0]}; {ADVICE}")
        for entry in _entries_of(cls):
            if entry.name in value:
                kind, null = _null_apart(kinds[entry.name], entry)
                if not (null and value[entry.name] is None):
                    read[entry.name] = _read(value[entry.name], kind, f"{place}.{entry.name}", path)
        return cls.of(read)

    def to_json(self) -> dict[str, Any]:
        """What the file says: entries that were there, and those that say something."""
        said = {f.name: getattr(self, f.name) for f in _entries_of(type(self)) if self._says(f)}
        said = {name: _plain(value) for name, value in {**said, **self.unknown}.items()}
        return {**{name: said[name] for name in self.order if name in said}, **said}

    def _says(self, entry: Field[Any]) -> bool:
        value = getattr(self, entry.name)
        if value is None:  # null may stand only where an entry has to
            return entry.default is MISSING
        return entry.name in self.order or value != entry.default


def _entries_of(kind: type[JsonRecord]) -> list[Field[Any]]:
    return [f for f in fields(kind) if f.name not in ("unknown", "order")]


def _null_apart(kind: Any, entry: Field[Any]) -> tuple[Any, bool]:
    """The form of what is not null, and whether null may stand in the file."""
    if get_origin(kind) is not UnionType:
        return kind, False
    return get_args(kind)[0], entry.default is MISSING


def _read(value: Any, kind: Any, place: str, path: Path) -> Any:
    """`value` as a field of type `kind` holds it."""
    if isinstance(kind, type) and issubclass(kind, JsonRecord):
        return kind.from_json(value, place, path)
    if get_origin(kind) is tuple:
        if not isinstance(value, list):
            _refuse(value, "a list", place, path)
        return tuple(_read(item, get_args(kind)[0], f"an entry of {place}", path) for item in value)
    if get_origin(kind) is dict:
        if not isinstance(value, dict):
            _refuse(value, "an object", place, path)
        return {name: _read(item, get_args(kind)[1], f"{place}.{name}", path) for name, item in value.items()}
    if kind is not Any and (isinstance(value, bool) or not isinstance(value, int | float if kind is float else kind)):
        _refuse(value, _WORDS[kind], place, path)
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, JsonRecord):
        return value.to_json()
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _refuse(value: Any, wanted: str, place: str, path: Path) -> None:
    raise TercelError(f"{place} in {path} must be {wanted}, not {str(value)[:40]!r}; {ADVICE}")
