"""Text that is not ours (data, file names, heads' files, what a model says), made fit to be shown.

A terminal obeys control characters: they set its title, fill the clipboard, clear the screen, or write over what
stands there. `visible` shows them instead. `encodable` writes what an output's encoding lacks in letters it has.
"""

from __future__ import annotations

import codecs
import io
import re
from typing import TextIO

# C0 without tab and line feed, DEL, C1, line and paragraph separators, bidirectional embeddings, overrides and
# isolates (which show a text in another order than it has), halves of characters, which no encoding takes, and the two
# that XML does not take.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")
_LAYOUT = str.maketrans({"\n": "\u240a", "\t": "\u2409"})
_PICTURES, _DELETE = 0x2400, "\u2421"  # Unicode's pictures of control characters

SPELLED = "tercel.spelled"  # the name of `_spelled` among Python's error handlers of encodings
_SPELLING = {
    "τ": "tau",
    "α": "alpha",
    "×": "x",
    "–": "-",
    "…": "...",
    "→": "->",
    "✓": "ok",
    "␣": "_",
    "⏎": "\\n",
    "⇥": "\\t",
    _DELETE: "^?",
    **{chr(_PICTURES + code): f"^{chr(code + 0x40)}" for code in range(0x20)},
}


def visible(text: str) -> str:
    """`text` with every character that a terminal would obey in a visible form: `␛`, `\\x9b`, `\\u202e`.

    Tabs and line feeds stay.
    """
    return _UNSAFE.sub(_form, text)


def one_line(text: str) -> str:
    """`visible`, and tabs and line feeds visible too: what has to be one line stays one."""
    return visible(text).translate(_LAYOUT)


def encodable(text: str, encoding: str) -> str:
    """`text` with characters that `encoding` lacks spelled out where they are this program's own, else `?`."""
    return text if encoding.startswith("utf") else text.encode(encoding, SPELLED).decode(encoding)


def never_fail(stream: TextIO | None) -> None:
    """Let a standard stream write what its encoding has, and the rest as `encodable` does, without an error."""
    if isinstance(stream, io.TextIOWrapper):  # others, such as StringIO, take every text
        stream.reconfigure(errors=SPELLED)


def _form(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x20:
        return chr(_PICTURES + code)
    if code == 0x7F:
        return _DELETE
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def _spelled(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(_SPELLING.get(char, "?") for char in error.object[error.start : error.end]), error.end


codecs.register_error(SPELLED, _spelled)
