"""Run `tercel` before screens of several kinds: a terminal, one of another encoding, one whose reader has gone."""

from __future__ import annotations

import io
import os
import re
import sys
import threading
import tty
from collections.abc import Iterator, Sequence
from typing import TextIO
from unittest.mock import patch

import pytest

from tercel.cli.app import main

from .running import Ended

# what rich itself sends: styles, the cursor of a live display, lines erased
OWN = re.compile(r"\x1b\[[0-9;]*m|\x1b\[\?25[lh]|\x1b\[[0-9]*[ABK]|\r(?=\x1b\[)|\r(?=\n)")
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

# a title, a cleared screen, a colour, what stands there written over, C1, letters in another order; and rich's markup
EVIL = "\x1b]0;owned\x07\x1b[2J\x1b[35mred\r\x08\x7f\x9b2J\u202e\u2066\u2028[/red][b]"
EVIL_NAME = EVIL.replace("/", "")  # as a file's


def harmless(ended: Ended, *, shows: str = "owned") -> None:
    """Assert that no foreign control character was sent, and that the text with them was shown."""
    sent = ended.out + ended.err
    assert not OBEYED.findall(OWN.sub("", sent)), repr(sent)
    assert "\x1b[35m" not in sent
    assert shows in OWN.sub("", sent), repr(sent)


def run_with(out: TextIO, err: TextIO, arguments: Sequence[str], typed: str = "") -> int:
    """The code of `main` with these standard streams, which it may change."""
    stdin = io.TextIOWrapper(io.BytesIO(typed.encode()), encoding="utf-8")
    with patch.object(sys, "stdout", out), patch.object(sys, "stderr", err), patch.object(sys, "stdin", stdin):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        out.flush()
        err.flush()
    return int(ended.value.code or 0)


def run_on_terminal(*arguments: str, typed: str = "", columns: int = 100) -> Ended:
    """With colours, on a terminal of that width, which has both streams."""
    ours, theirs = os.openpty()
    tty.setraw(theirs)  # the terminal's driver changes nothing
    sent: list[bytes] = []
    reader = threading.Thread(target=lambda: sent.extend(_read(ours)))
    reader.start()
    environment = {"TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": "40"}
    with patch.dict(os.environ, environment):
        os.environ.pop("NO_COLOR", None)
        with open(theirs, "w", encoding="utf-8") as screen:
            code = run_with(screen, screen, arguments, typed)
    reader.join()
    os.close(ours)
    return Ended(code, b"".join(sent).decode(), "")


def run_encoded(encoding: str, *arguments: str) -> Ended:
    """Into files of an encoding, strictly."""
    files = [io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict") for _ in range(2)]
    code = run_with(files[0], files[1], arguments)
    out, err = (file.buffer.getvalue().decode(encoding) for file in files)  # type: ignore[attr-defined]
    return Ended(code, out, err)


def run_unread(*arguments: str) -> Ended:
    """Into a pipe whose reader has gone."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", encoding="utf-8") as out, io.StringIO() as err:
        code = run_with(out, err, arguments)
        return Ended(code, "", err.getvalue())


def _read(descriptor: int) -> Iterator[bytes]:
    while True:
        try:
            block = os.read(descriptor, 1 << 16)
        except OSError:  # nobody holds the other end any more
            return
        if not block:
            return
        yield block
