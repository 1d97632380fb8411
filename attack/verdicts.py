"""When an input counts as clean.

A command about it ends by itself, within its limits of time and memory, in one of three ways:

* code 0, and what it gives is right, as far as the input allows to say what that is;
* code 2 with one sentence on standard error that says what is wrong, and nothing written;
* code 1, for the verbs that check something (`doctor`, `verify`), when the check failed.

Never: a traceback, "unexpected error", a signal, another code; control characters that come from the input on a
terminal or in a table; anything changed beside the output that was asked for; anything left over.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from attack.child import MIB
from attack.forks import Ended
from attack.inputs import Command, Room
from attack.watch import Picture, differences

SENTENCE = 2000  # characters of a refusal, beside what it repeats of the command
GROWN = 700 * MIB  # beyond what the imports take
PROGRAM_GROWN = 1300 * MIB  # with them
SLOW = 15.0  # seconds of processor time
LEFTOVER = re.compile(r"\.(part|old|tmp|lock)$|\.part/")
ALLOCATION = re.compile(r"DefaultCPUAllocator|MemoryError|can't allocate|[Cc]annot allocate memory|bad_alloc")
# what rich writes on a terminal: colours (but not the hidden and the blinking one), the cursor, lines cleared
OWN = re.compile(r"\x1b\[(?!(?:\d+;)*(?:5|8)m)[\d;]*m|\x1b\[\?25[lh]|\x1b\[[0-9]*[AKG]|\r")
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\x80-\x9f]")


def faults(command: Command, room: Room, ended: Ended, before: Picture, after: Picture, program: bool) -> list[str]:
    """What was wrong with how a command ended; [] if it was clean."""
    out, err = (stream.decode("utf-8", "surrogateescape") for stream in (ended.out, ended.err))
    found = [*_ending(command, ended, err), *_cost(ended, program), *_text(command, out, err)]
    refused = ended.code == 2
    if not found:
        if command.must == "refuse" and ended.code == 0:
            found.append("taken without a word, but it has to be refused")
        if command.must == "run" and refused:
            found.append(f"refused, but it is fine: {err.strip()[:300]}")
    allowed = () if refused and not command.leaves else command.out
    found += [f"changed: {line}" for line in differences(before, after, (*allowed, *_own_places(room)))]
    found += [f"left over: {path}" for path in sorted(set(after) - set(before)) if _is_leftover(path, command)]
    if not found and ended.code == 0 and command.check is not None:
        try:
            wrong = command.check(room, ended)
        except (OSError, ValueError, KeyError, TypeError) as error:
            wrong = f"the result cannot be read: {error!r}"
        found += [f"wrong: {wrong}"] if wrong else []
    return found


def _own_places(room: Room) -> tuple[str, ...]:
    """The cache of the user who gives the command."""
    return ("home", "home/.cache")


def _is_leftover(path: str, command: Command) -> bool:
    return not command.leaves and bool(LEFTOVER.search(path)) and not path.startswith("home/.cache/huggingface")


def _ending(command: Command, ended: Ended, err: str) -> list[str]:
    if ended.stopped:
        return [f"{ended.stopped} after {ended.wall:.0f} s"]
    if ended.signal is not None:
        return [f"ended by signal {ended.signal}: {err.strip()[-200:]}"]
    if "Traceback (most recent call last)" in err or "panicked at" in err:
        return [f"traceback: {err.strip()[-300:]}"]
    if "unexpected error" in err:
        return [err.strip()[:400]]
    if ended.code == 2:
        return _sentence(command, err)
    if ended.code not in command.codes:
        return [f"exit code {ended.code}: {err.strip()[-300:]}"]
    return []


def _sentence(command: Command, err: str) -> list[str]:
    text = (screen(err) if command.terminal else err).strip()
    lines = text.splitlines()
    if len(lines) != 1:
        return [f"{len(lines)} lines instead of one sentence: {text[:300]!r}"]
    if not text.startswith("error: "):
        return [f"no sentence that begins with `error: `: {text[:300]!r}"]
    if len(text) > SENTENCE + 2 * sum(map(len, command.arguments)):
        return [f"a sentence of {len(text)} characters: {text[:200]!r}…"]
    if ALLOCATION.search(text):
        return [f"memory was asked for before the size was checked: {text[:300]}"]
    return []


def _cost(ended: Ended, program: bool) -> list[str]:
    found = []
    if ended.grown > (PROGRAM_GROWN if program else GROWN):
        found.append(f"took {ended.grown // MIB} MiB")
    if ended.cpu > SLOW:
        found.append(f"took {ended.cpu:.0f} s of processor time")
    return found


def _text(command: Command, out: str, err: str) -> list[str]:
    found = []
    for name, text in (
        ("standard output", "" if command.answer and not command.terminal else out),
        ("standard error", err),
    ):
        shown = OWN.sub("", text) if command.terminal else text
        if match := CONTROL.search(shown):
            near = shown[max(0, match.start() - 30) : match.end() + 30]
            found.append(f"control characters on {name}: {near!r}")
    return found


def screen(text: str) -> str:
    """What stands on a terminal in the end: bars that were drawn and cleared again are gone."""
    lines, row = [""], 0
    for part in re.split(r"(\x1b\[[\d;?]*[A-Za-z]|\r|\n)", text):
        if part == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif part == "\r" or (part.endswith("K") and part.startswith("\x1b[")):
            lines[row] = "" if part != "\r" else lines[row]
        elif part.endswith("A") and part.startswith("\x1b["):
            row = max(0, row - int(part[2:-1] or 1))
        elif not part.startswith("\x1b["):
            lines[row] += part
    return "\n".join(lines)


def summary(found: Sequence[str]) -> str:
    """One line."""
    return "; ".join(" ".join(text.split()) for text in found)[:700]


def relative(path: Path, room: Room) -> str:
    return str(path.relative_to(room.path))
