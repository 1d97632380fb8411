"""What a command finds around it: no home, another encoding, closed or full outputs, no rights, no room, a twin.

What is read when the interpreter starts or a module is imported is tried with programs of their own.
"""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

from attack.child import MIB, Limits
from attack.forks import Ended
from attack.hostile import honest, listen
from attack.inputs import Command, Kind, Must, Room, Trial
from attack.kinds.common import ASK, same_answer
from attack.kinds.runs import same_head
from attack.world import ANSWER, regenerating

Build = Callable[[Room], Command]
FULL = 200  # bytes of a file on a full disk
GONE = frozenset(
    {0, 130, 141}
)  # where nobody reads any more: done all the same, training stopped, or as the shell says it


def generating(room: Room) -> Command:
    return Command(["generate", str(room.world.target), str(room.world.head), *ASK], check=same_answer, answer=True)


def inspecting(room: Room) -> Command:
    return Command(["inspect", str(room.world.head), "--json", "report.json"], out=("report.json",), check=_has_report)


def showing(room: Room) -> Command:
    asked = ["data", "show", str(room.world.answers), "--target", str(room.world.target), "--samples", "99"]
    return Command([*asked, "--json", "counts.json"], out=("counts.json",))


def benching(room: Room) -> Command:
    asked = ["bench", str(room.world.target), str(room.world.head), "--tasks", str(room.world.asked), "--n-alpha", "2"]
    return Command(
        [*asked, "--max-new-tokens", "4", "--dtype", "float32", "--json", "report.json"],
        out=("report.json",),
        check=_has_report,
    )


def verifying(room: Room) -> Command:
    asked = ["verify", str(room.world.target), str(room.world.head), "--tasks", str(room.world.asked), "--samples", "2"]
    return Command(
        [*asked, "--max-new-tokens", "4", "--json", "report.json"],
        out=("report.json",),
        check=_has_report,
        codes=frozenset({0, 1}),
    )


def doctoring(room: Room) -> Command:
    return Command(["doctor", str(room.world.target), str(room.world.head)], codes=frozenset({0, 1}))


def exporting(room: Room) -> Command:
    asked = ["export", str(room.world.head), "--to", "vllm", "--target", str(room.world.target), "--out", "made"]
    return Command(asked, out=("made",))


def training(room: Room) -> Command:
    return Command(room.world.training("head"), out=("head",), check=same_head)


def answering(room: Room) -> Command:
    places = ("out.jsonl", "out.jsonl.part", "out.jsonl.settings.json")
    return Command(regenerating(room.world, "out.jsonl"), out=places, check=_all_answered)


def converting(room: Room) -> Command:
    return Command(["generate", str(room.world.gguf), "--draft", "none", *ASK], answer=True)


VERBS: dict[str, Build] = {
    "generate": generating,
    "inspect": inspecting,
    "data show": showing,
    "bench": benching,
    "verify": verifying,
    "doctor": doctoring,
    "export": exporting,
    "train": training,
    "regenerate": answering,
    "generate from GGUF": converting,
}


def _has_report(room: Room, ended: Ended) -> str | None:
    return None if json.loads((room.path / "report.json").read_text("utf-8")) else "the report is empty"


def _all_answered(room: Room, ended: Ended) -> str | None:
    rows = [json.loads(line) for line in (room.path / "out.jsonl").read_text("utf-8").splitlines()]
    right = len((room.world.begun / "whole.jsonl").read_text("utf-8").splitlines())
    return (
        None
        if len(rows) == len({row["id"] for row in rows}) == right
        else f"{len(rows)} lines for {right} conversations"
    )


def around(title: str, verb: str, must: Must = "run", lay: Callable[[Room], Any] | None = None, **more: Any) -> Trial:
    def make(room: Room, chance: Random) -> Command:
        if lay is not None:
            lay(room)
        command = VERBS[verb](room).but(must=must, **more)
        return command.but(leaves=True) if verb in ("train", "regenerate") else command

    return Trial(f"{verb}: {title}", make)


def full_disk(verb: str, room_left: int) -> Trial:
    """No file can grow beyond a size, as on a full disk."""
    return around(
        f"a disk with room for {room_left} bytes a file", verb, "either", limits=replace(Limits(), file=room_left)
    )


def unwritable(room: Room) -> None:
    """The working folder can be read only (the command runs under another user id, so that this holds)."""
    os.chmod(room.path, 0o555)


def full_home(room: Room) -> None:
    room.write("a-file", "x")


# ------------------------------------------------------------------------------------------- two at the same time


def twins(verb: str) -> Trial:
    """Another process with the same command and output starts at the same time: one does the work whole, the other
    is refused, or finds it done; nothing is mixed."""

    def make(room: Room, chance: Random) -> Command:
        command = VERBS[verb](room)
        return command.but(twin=True, leaves=True, out=(*command.out, "tmp"), check=partial(_both_ended, command.check))

    return Trial(f"{verb}: two with one output", make)


def _both_ended(check: Any, room: Room, ended: Ended) -> str | None:
    codes = ast.literal_eval((room.path / "tmp" / "codes").read_text("ascii"))
    for name, code in zip(("one", "two"), codes, strict=True):
        said = (room.path / "tmp" / f"{name}.err").read_text("utf-8").strip()
        if code not in (0, 2) or (code == 2 and (len(said.splitlines()) != 1 or not said.startswith("error: "))):
            return f"one of the two ended with code {code}: {said[-300:]}"
    if 0 not in codes:
        return "both were refused"
    return None if check is None else str(check(room, ended) or "") or None


def _listed() -> list[Trial]:
    trials = []
    environments: dict[str, dict[str, str | None]] = {
        "no home": {"HOME": None},
        "an empty home": {"HOME": ""},
        "a home that is not there": {"HOME": "/nonexistent"},
        "a file as home": {"HOME": "/etc/passwd"},
        "a relative home": {"HOME": "home"},
        "no environment at all": {
            "HOME": None,
            "LANG": None,
            "TERM": None,
            "COLUMNS": None,
            "TMPDIR": None,
            "PATH": None,
        },
        "no temporary folder": {"TMPDIR": "/nonexistent"},
        "a cache that is a file": {"XDG_CACHE_HOME": "/etc/passwd"},
        "a relative cache": {"XDG_CACHE_HOME": "home/x"},
        "an empty cache": {"XDG_CACHE_HOME": ""},
        "a console of ASCII": {"PYTHONIOENCODING": "ascii", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        "a console of cp1252": {"PYTHONIOENCODING": "cp1252"},
        "a console of latin-1": {"PYTHONIOENCODING": "latin-1"},
        "a console of cp437": {"PYTHONIOENCODING": "cp437"},
        "a console of UTF-16": {"PYTHONIOENCODING": "utf-16"},
        "one column": {"COLUMNS": "1"},
        "no columns": {"COLUMNS": "0"},
        "columns of text": {"COLUMNS": "x"},
        "a million columns": {"COLUMNS": "1000000"},
        "an unknown terminal": {"TERM": "x"},
        "a dumb terminal": {"TERM": "dumb"},
        "colours forced": {"FORCE_COLOR": "1", "CLICOLOR_FORCE": "1"},
        "another language": {"LANG": "tr_TR.UTF-8", "LC_ALL": "tr_TR.UTF-8"},
        "a locale that is not there": {"LC_ALL": "xx_XX"},
        "a zone that is not there": {"TZ": "X/Y"},
        "a proxy": {
            "http_proxy": "http://127.0.0.1:9",
            "https_proxy": "http://127.0.0.1:9",
            "all_proxy": "http://127.0.0.1:9",
        },
        "a proxy that is none": {"http_proxy": ":::"},
    }
    usual = (
        "generate",
        "inspect",
        "bench",
        "data show",
        "doctor",
        "regenerate",
        "export",
        "verify",
        "train",
        "generate from GGUF",
    )
    for number, (title, changes) in enumerate(environments.items()):
        # a home that is none may stop what has to be kept there
        must: Must = "either" if "home" in title or "cache" in title else "run"
        encoded = {"answer": True} if "console" in title or "colours" in title else {}
        for at, verb in enumerate((usual[number % 10], usual[(number + 4) % 10], usual[(number + 7) % 10])):
            more: dict[str, Any] = {
                "environment": changes,
                "encoding": changes.get("PYTHONIOENCODING", "utf-8"),
                **encoded,
            }
            if title == "colours forced":
                more["terminal"] = True
            if "console" in title and verb == "generate":
                more["check"] = None  # what the console cannot show is replaced
            trials.append(around(title, verb, must, program=at == 0, **more))
    for title in ("a console of ASCII", "a console of cp1252", "a console of latin-1", "a console of cp437"):
        for verb in ("bench", "verify", "inspect", "train"):
            encoding = environments[title]["PYTHONIOENCODING"]
            trials.append(around(f"{title}, its report", verb, "run", encoding=encoding, answer=True))
    for verb in VERBS:
        trials += [
            around("standard output closed", verb, "either", stdout="", codes=frozenset({0, 1}), check=None),
            around("nobody reads standard output to its end", verb, "either", hang_up=20, check=None, codes=GONE),
            around("a user without a name", verb, "run", stranger=True),
            around(
                "a user without a name or a home",
                verb,
                "either",
                stranger=True,
                environment={"HOME": None},
                program=verb in ("generate", "train", "regenerate"),
            ),
            around("a folder that cannot be written", verb, "either", unwritable, stranger=True),
        ]
    for verb in ("train", "regenerate", "inspect", "export", "bench", "generate from GGUF", "verify", "data show"):
        for size in (0, FULL, 5000, 30_000):
            trials.append(full_disk(verb, size))
    trials += [
        around("few open files", verb, "either", limits=replace(Limits(), files=20))
        for verb in ("train", "generate", "bench")
    ]
    trials += [
        around("little memory", verb, "either", limits=replace(Limits(), memory=300 * MIB)) for verb in ("generate",)
    ]
    trials += [proxied(name) for name in ("http_proxy", "HTTP_PROXY", "all_proxy")]
    trials += [twins("train"), twins("regenerate"), twins("export"), twins("generate from GGUF")] * 3
    return trials


def proxied(name: str) -> Trial:
    """A server on this machine is not asked through a proxy."""

    def make(room: Room, chance: Random) -> Command:
        asked = [
            "doctor",
            str(room.world.target),
            str(room.world.head),
            "--url",
            "http://127.0.0.1:{port}",
            "--engine",
            "vllm",
        ]
        return Command(
            [*asked, "--tasks", str(room.world.asked), "--max-new-tokens", str(ANSWER), "--timeout", "20"],
            must="run",
            server=partial(listen, honest(room.world.facts["served"])),
            codes=frozenset({0, 1}),
            program=True,
            environment={name: "http://127.0.0.1:9"},
        )

    return Trial(f"doctor --url: a server of this machine with {name} set", make)


KIND = Kind("surroundings", "environments, streams, rights, room on the disk", tuple(_listed()), None, quick=(5, 0))
