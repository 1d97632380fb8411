"""The header of a GGUF file, walked through before anything is made of it: every length is compared with what is left
of the file. The reader that comes after believes what it finds."""

from __future__ import annotations

import struct
from math import prod
from pathlib import Path
from typing import BinaryIO

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from tercel import limits
from tercel.errors import TercelError

_MAGIC, _VERSIONS, _ALIGNMENT = b"GGUF", (2, 3), 32
_SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}


def check_header(file: Path) -> tuple[int, int]:
    """How many tensors the file holds, and how many numbers they are.

    Raises `TercelError` for a file that is no GGUF, is cut off, or claims more than it has room for.
    """
    try:
        with file.open("rb") as stream:
            return _Header(stream, file.stat().st_size).contents()
    except (_DamagedError, OSError) as error:
        raise TercelError(f"{file} is not a whole GGUF file ({error}); download or convert it again") from error


class _DamagedError(Exception):
    """What is wrong, as a clause."""


class _Header:
    def __init__(self, stream: BinaryIO, size: int) -> None:
        self._stream, self._size = stream, size
        self._entries = 0  # of all lists: the reader makes objects of each

    def contents(self) -> tuple[int, int]:
        if self._bytes(4) != _MAGIC:
            raise _DamagedError("it does not begin as one")
        if (version := self._scalar("I")) not in _VERSIONS:
            raise _DamagedError(f"it has version {version}, and 2 and 3 are read")
        tensors, fields = self._scalar("Q"), self._scalar("Q")
        self._at_most("tensors", tensors, limits.GGUF_TENSORS)
        self._at_most("settings", fields, limits.GGUF_FIELDS)
        alignment = _ALIGNMENT
        for _ in range(fields):
            name = self._string()
            value = self._value(self._kind())
            if name == b"general.alignment":
                alignment = value if isinstance(value, int) else 0
        if alignment < 1 or alignment & (alignment - 1):
            raise _DamagedError("its alignment is not a power of two")
        placed = [self._tensor() for _ in range(tensors)]
        start = -(-self._stream.tell() // alignment) * alignment
        for offset, length, _ in placed:
            if start + offset + length > self._size:
                raise _DamagedError("it is cut off, or a tensor claims more than the file holds")
        return tensors, sum(count for _, _, count in placed)

    def _tensor(self) -> tuple[int, int, int]:
        """Offset, bytes, and numbers."""
        self._string()
        dimensions = self._scalar("I")
        self._at_most("dimensions of a tensor", dimensions, limits.GGUF_DIMENSIONS)
        count = prod(self._scalar("Q") for _ in range(dimensions))
        kind, offset = self._scalar("I"), self._scalar("Q")
        try:
            block, width = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        except (ValueError, KeyError) as error:
            raise _DamagedError(f"a tensor has the unknown type {kind}") from error
        return offset, count // block * width, count

    def _kind(self) -> GGUFValueType:
        kind = self._scalar("I")
        try:
            return GGUFValueType(kind)
        except ValueError as error:
            raise _DamagedError(f"a setting has the unknown type {kind}") from error

    def _value(self, kind: GGUFValueType) -> int | None:
        """Passes over a value; a single number comes back."""
        if kind is GGUFValueType.STRING:
            self._string()
            return None
        if kind is not GGUFValueType.ARRAY:
            return int.from_bytes(self._bytes(struct.calcsize(_SCALARS[kind])), "little")
        entries, count = self._kind(), self._scalar("Q")
        self._entries += count
        self._at_most("entries of lists", self._entries, limits.GGUF_ENTRIES)
        if entries is GGUFValueType.ARRAY:
            raise _DamagedError("a list holds lists")
        if entries is not GGUFValueType.STRING:
            self._skip(count * struct.calcsize(_SCALARS[entries]))
            return None
        for _ in range(count):
            self._string()
        return None

    def _string(self) -> bytes:
        """The first bytes of a string, as many as names have."""
        length = self._scalar("Q")
        text = self._bytes(min(length, 64))
        self._skip(length - len(text))
        return text

    def _scalar(self, form: str) -> int:
        return int(struct.unpack(f"<{form}", self._bytes(struct.calcsize(f"<{form}")))[0])

    def _bytes(self, count: int) -> bytes:
        data = self._stream.read(count)
        if len(data) < count:
            raise _DamagedError("it is cut off within its header")
        return data

    def _skip(self, count: int) -> None:
        if count > self._size - self._stream.tell():
            raise _DamagedError(f"something in its header claims {count:,} bytes, more than are left of it")
        self._stream.seek(count, 1)

    def _at_most(self, what: str, count: int, most: int) -> None:
        if count > most:
            raise _DamagedError(f"it claims {count:,} {what}, and no model has more than {most:,}")
