"""Bytes of a data file, plain or gzipped, in pieces that never outgrow memory: numbered lines, or decoded text."""

from __future__ import annotations

import codecs
import gzip
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from tercel import limits
from tercel.errors import TercelError
from tercel.reading import UnreadableError

BLOCK = 1 << 20  # bytes read at a time
_GZIP = b"\x1f\x8b"
_MARK = codecs.BOM_UTF8


def blocks(path: Path) -> Iterator[bytes]:
    """The file's bytes, unpacked if it is gzip (told by its first bytes) and without a byte order mark.

    Raises `TercelError` if it cannot be read, is cut off, or unpacks to far more than text does.
    """
    try:
        with path.open("rb") as file:
            packed = file.read(2) == _GZIP
            file.seek(0)
            stream: IO[bytes] = gzip.GzipFile(fileobj=file) if packed else file  # type: ignore[assignment]
            most = max(limits.UNPACKED_FREE, limits.UNPACKED_RATIO * os.fstat(file.fileno()).st_size)
            total = 0
            while block := stream.read(BLOCK):
                yield block.removeprefix(_MARK) if not total else block
                total += len(block)
                if packed and total > most:
                    raise TercelError(
                        f"{path} unpacks to more than {most >> 20} MiB, {limits.UNPACKED_RATIO} times its size, as no "
                        "text does; unpack it yourself if you trust it"
                    )
    except (OSError, EOFError, zlib.error) as error:  # gzip raises EOFError for a cut file
        reason = getattr(error, "strerror", None) or error
        raise TercelError(f"cannot read {path}: {reason}; is the file whole, and UTF-8 text or gzip?") from error


def first_character(path: Path) -> str:
    """The first character that is not white space, "" if there is none."""
    return next((stripped[:1].decode("latin-1") for block in blocks(path) if (stripped := block.lstrip())), "")


def text_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines that are not blank, with their numbers from 1.

    Raises `TercelError`, with the line's number, for one that is too long or no UTF-8, and as `blocks`.
    """
    number, rest = 1, b""
    for block in blocks(path):
        if not rest and block.isspace():
            number += block.count(b"\n")
            continue
        *whole, rest = (rest + block).split(b"\n")
        for line in whole:
            if text := _decoded(line, path, number):
                yield number, text
            number += 1
        if len(rest) > limits.LINE_BYTES:
            _decoded(rest, path, number)
    if text := _decoded(rest, path, number):
        yield number, text


def _decoded(line: bytes, path: Path, number: int) -> str:
    """The line as text, "" if it is blank."""
    if len(line) > limits.LINE_BYTES:
        raise TercelError(
            f"{path}, line {number}: longer than the {limits.LINE_BYTES >> 20} MiB that a line may have; "
            "split it, or remove it"
        )
    try:
        return line.decode().strip()
    except UnicodeDecodeError as error:
        raise TercelError(f"{path}, line {number}: {_bad_byte(error)}; repair or remove it") from error


def text_blocks(path: Path) -> Iterator[str]:
    """The whole text in pieces. Raises `UnreadableError` where bytes are no UTF-8, after the text before them (a
    character that is cut off at the end is left out), and `TercelError` as `blocks`."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    for block in blocks(path):
        try:
            if piece := decoder.decode(block):
                yield piece
        except UnicodeDecodeError as error:
            yield error.object[: error.start].decode()
            raise UnreadableError(_bad_byte(error)) from error


def _bad_byte(error: UnicodeDecodeError) -> str:
    return f"the byte {error.object[error.start]:#04x} is not UTF-8"
