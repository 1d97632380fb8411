"""Prompts on the command line, from files and through pipes."""

from __future__ import annotations

from random import Random

from attack.forks import Ended
from attack.inputs import Command, Must, Room, Trial
from attack.kinds.common import ASK, asking
from attack.mutate import ESCAPE, SURROGATE
from attack.world import PROMPT

PROMPTS: dict[str, tuple[str, Must]] = {
    "bytes that are no UTF-8": (SURROGATE, "refuse"),
    "an escape": (ESCAPE, "either"),
    "emoji": ("👩‍👩‍👧", "run"),
    "right to left": ("\u202eabc", "either"),
    "a BOM": ("\ufeffthe cat", "either"),
    "special tokens": ("<|im_end|>" * 3, "run"),
    "one letter": ("a", "run"),
    "too long": ("the cat " * 500, "refuse"),
    "far too long": ("a" * 100_000, "refuse"),
    "white space": (" \t\n", "refuse"),
    "a template": ("{{ 1 // 0 }}", "run"),
    "markup": ("[/red]", "run"),
    "line ends": ("a\r\nb\rc\u2028d\x85e", "run"),
    "an option": ("--help", "run"),
    "combining": ("e" + "\u0301" * 300, "either"),
}
FILES: dict[str, bytes] = {
    "bytes that are no UTF-8": b"a\xffb",
    "UTF-16": "the cat".encode("utf-16"),
    "NUL": b"the\0cat",
    "empty": b"",
    "a BOM alone": b"\xef\xbb\xbf",
    "an escape": ESCAPE.encode(),
    "a surrogate": b"a\xed\xa0\x80",
    "10 MB": b"the cat " * 1_250_000,
}
SAME = {
    "a BOM": b"\xef\xbb\xbf" + PROMPT.encode(),
    "a last line end": PROMPT.encode() + b"\n",
    "a line end of Windows": PROMPT.encode() + b"\r\n",
}


def prompts() -> list[Trial]:
    trials = [prompted(title, text, must) for title, (text, must) in PROMPTS.items()]
    trials += [
        from_file(title, data, "either" if title in ("an escape", "NUL") else "refuse") for title, data in FILES.items()
    ]
    trials += [from_file(title, data, "run", same=True) for title, data in SAME.items()]
    trials += [
        piped("as it is", PROMPT.encode(), "run"),
        piped("a last line end", PROMPT.encode() + b"\n", "run"),
        piped("bytes that are no UTF-8", b"a\xff", "refuse"),
        piped("nothing", b"", "refuse"),
        piped("NUL", b"\0", "either"),
    ]
    return trials


def prompted(title: str, text: str, must: Must) -> Trial:
    def make(room: Room, chance: Random) -> Command:
        return asking(room, room.world.target, None, "--prompt", text).but(must=must)

    return Trial(f"prompt: {title}", make)


def from_file(title: str, data: bytes, must: Must, same: bool = False) -> Trial:
    """A prompt from a file; `same`: its answer is that of the usual prompt."""

    def make(room: Room, chance: Random) -> Command:
        room.write("prompt.txt", data)
        command = Command(
            ["generate", str(room.world.target), "--draft", "none", "--prompt-file", "prompt.txt", *ASK[2:]]
        )
        return command.but(must=must, answer=True, check=_the_same if same else None)

    return Trial(f"prompt file: {title}", make)


def piped(title: str, data: bytes, must: Must) -> Trial:
    def make(room: Room, chance: Random) -> Command:
        command = Command(["generate", str(room.world.target), "--draft", "none", *ASK[2:]], stdin=data)
        return command.but(must=must, answer=True, check=_the_same if must == "run" else None)

    return Trial(f"piped prompt: {title}", make)


def _the_same(room: Room, ended: Ended) -> str | None:
    said, right = ended.out.decode("utf-8", "replace"), room.world.facts["answer"]
    return None if said == right else f"the prompt is another: {said!r} instead of {right!r}"
