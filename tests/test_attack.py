"""A quick attack: a few hostile inputs of every kind; and the harness itself, which has to notice what it is for."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import pytest

from attack.campaign import Result, endless
from attack.forks import Ended
from attack.inputs import Command, Room
from attack.kills import Killed
from attack.kinds import KINDS
from attack.mutate import ODD, RAW, change_json, to_json
from attack.report import BEGIN, END, merged, report, write_table
from attack.verdicts import faults, screen
from attack.watch import differences, picture
from attack.world import World

ROOT = Path(__file__).parent.parent
SEED = 0


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """In a process of its own: only one without threads can fork children that are sound."""
    found = tmp_path_factory.mktemp("attack") / "attack.json"
    command = [sys.executable, "-m", "attack", "--quick", "--seed", str(SEED), "--json", str(found)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert found.is_file(), done.stderr
    return dict(json.loads(found.read_text("utf-8")))


@pytest.mark.parametrize("kind", [kind.name for kind in KINDS])
def test_hostile_inputs_end_cleanly(attacked: dict[str, Any], kind: str) -> None:
    (numbers,) = (known.numbers(quick=True) for known in KINDS if known.name == kind)
    assert attacked["kinds"][kind]["inputs"] == len(numbers) >= 5
    bad = [row for row in attacked["not_clean"] if row["kind"] == kind]
    assert not bad, "\n".join(f"{row['id']} ({row['title']}): {row['faults']}" for row in bad)


def ended(code: int = 0, out: str = "", err: str = "", **more: Any) -> Ended:
    values = {"signal": None, "cpu": 0.1, "wall": 0.1, "grown": 0, **more}
    return Ended(code=code, out=out.encode(), err=err.encode(), **values)


def judged(
    tmp_path: Path, how: Ended, command: Command | None = None, after: dict[str, str] | None = None
) -> list[str]:
    room = Room(tmp_path, World(tmp_path))
    return faults(
        command or Command(["inspect"]),
        room,
        how,
        {"a": "file"},
        {"a": "file"} if after is None else after,
        program=False,
    )


def test_clean_ends_are_clean(tmp_path: Path) -> None:
    assert judged(tmp_path, ended(0, "table\n")) == []
    assert judged(tmp_path, ended(2, "", "error: it is wrong; repair it\n")) == []
    assert judged(tmp_path, ended(1, "1 problem"), Command(["doctor"], codes=frozenset({0, 1}))) == []


@pytest.mark.parametrize(
    ("how", "word"),
    [
        (ended(1, "", "unexpected error: ValueError: x"), "unexpected error"),
        (ended(1, "", "Traceback (most recent call last):\n  x"), "traceback"),
        (ended(1), "exit code 1"),
        (ended(2, "", "error: a\nb\n"), "2 lines"),
        (ended(2, "", "no such thing\n"), "no sentence"),
        (ended(2, "", "error: " + "a" * 5000), "a sentence of"),
        (ended(2, "", "error: DefaultCPUAllocator: can't allocate memory"), "memory was asked for"),
        (ended(0, "a\x1b[2Jb"), "control characters"),
        (ended(2, "", "error: a\x1b]0;x\x07 is wrong"), "control characters"),
        (ended(0, grown=2 << 30), "MiB"),
        (ended(0, cpu=99.0), "processor time"),
        (ended(0, stopped="out of time"), "out of time"),
        (ended(code=None, signal=11), "signal 11"),  # type: ignore[arg-type]
    ],
)
def test_every_fault_is_noticed(tmp_path: Path, how: Ended, word: str) -> None:
    assert word in judged(tmp_path, how)[0]


def test_an_interruption_ends_the_command_too(tmp_path: Path) -> None:
    script = f"""
import os, signal, time
from pathlib import Path
from attack.child import Limits, Surroundings
from attack.forks import run

def main(arguments):
    Path("child").write_text(str(os.getpid()))
    time.sleep(0.5)
    os.kill(os.getppid(), signal.SIGINT)
    time.sleep(60)

try:
    run([], Surroundings({{}}, Path({str(tmp_path)!r})), Limits(), main)
except KeyboardInterrupt:
    os.waitpid(int(Path({str(tmp_path)!r}, "child").read_text()), 0)
    print("ended")
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=50)
    assert done.stdout == "ended\n", done.stderr


def test_what_a_command_may_not_do_is_noticed(tmp_path: Path) -> None:
    assert "taken without a word" in judged(tmp_path, ended(0), Command(["x"], must="refuse"))[0]
    assert "refused, but" in judged(tmp_path, ended(2, "", "error: no\n"), Command(["x"], must="run"))[0]
    assert "wrong: no" in judged(tmp_path, ended(0), Command(["x"], check=lambda room, how: "no"))[0]
    assert judged(tmp_path, ended(0), after={}) == ["changed: a is gone"]
    assert judged(tmp_path, ended(0), Command(["x"], out=("b",)), {"a": "file", "b": "file"}) == []
    assert (
        "b appeared"
        in judged(tmp_path, ended(2, "", "error: no\n"), Command(["x"], out=("b",)), {"a": "file", "b": ""})[0]
    )
    assert "left over" in judged(tmp_path, ended(0), Command(["x"], out=(".b.part",)), {"a": "file", ".b.part": ""})[0]


def test_changes_in_a_folder_are_seen(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    before = picture(tmp_path)
    (tmp_path / "a").chmod(0o600)
    (tmp_path / "b").symlink_to("a")
    assert len(differences(before, picture(tmp_path))) == 2
    assert differences(before, picture(tmp_path), ["a", "b"]) == []


def test_a_terminal_shows_what_was_not_cleared() -> None:
    assert screen("\x1b[?25lworking\r\x1b[2Kdone\n\x1b[31merror: x\x1b[0m\n") == "done\nerror: x\n"
    assert screen("one\ntwo\x1b[1A\x1b[2K\x1b[1B") == "\ntwo"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_an_input_is_made_anew_from_its_number(kind: Any) -> None:
    numbers = kind.numbers(quick=False)
    for number in {0, numbers[-1], len(numbers) // 2}:
        (first, one), (second, other) = kind.trial(number, SEED), kind.trial(number, SEED)
        assert first.title == second.title
        assert one.random() == other.random()
    assert set(kind.numbers(quick=True)) <= set(numbers)


def test_changes_come_from_the_seed() -> None:
    value = {"a": [1, 2, {"b": "x"}], "c": 3.5}
    assert change_json(Random(5), value) == change_json(Random(5), value)
    assert len({change_json(Random(i), value)[1] for i in range(50)}) > 25
    assert value == {"a": [1, 2, {"b": "x"}], "c": 3.5}
    assert to_json({"a": RAW + "[[", "b": ODD["null"]}) == b'{"a": [[, "b": null}'


def test_reports_of_parts_add_up_to_that_of_the_whole() -> None:
    results = [
        Result(kind.name, number, "", (), ("bad",) * (number % 5 == 0), 2 * (number % 2), cpu, cpu, 0, number % 3 == 0)
        for cpu, (number, kind) in enumerate((number, kind) for number in range(20) for kind in KINDS[:2])
    ]
    kills = [Killed("train", 7, 7), Killed("save", 3, 3, "gone")]
    whole = report(results, kills, KINDS[:2], SEED)
    parts = merged([report(results[part::2], kills[part::2], KINDS[:2], SEED) for part in (0, 1)])
    for found in (whole, parts):
        found["not_clean"].sort(key=lambda row: str(row["id"]))
    assert parts == whole
    assert merged([whole]) == whole


def test_further_inputs_of_parts_are_all_different_and_of_every_kind() -> None:
    kinds = [kind for kind in KINDS if kind.further]
    whole, *parts = (
        list(islice(endless(KINDS, {kind.name: part for kind in KINDS}, step), count * len(kinds)))
        for part, step, count in ((0, 1, 6), (0, 2, 3), (1, 2, 3))
    )
    assert {kind.name for kind, _ in parts[0]} == {kind.name for kind, _ in parts[1]} == {kind.name for kind in kinds}
    assert sorted((kind.name, number) for part in parts for kind, number in part) == sorted(
        (kind.name, number) for kind, number in whole
    )


def test_only_the_table_of_the_page_is_replaced(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n", "utf-8")
    counts = {"about": "heads", "inputs": 5, "clean": 4, "refused": 3, "programs": 1}
    kill = {"name": "train", "tried": 7, "points": 7, "fault": ""}
    found = {
        "kinds": {"heads": counts},
        "kills": [kill],
        "inputs": 5,
        "clean": 4,
        "seconds": 60,
        "date": "d",
        "machine": "m",
        "seed": 0,
    }
    write_table({**found, "command": "c", "not_clean": [{"id": "heads:3"}]}, page)
    text = page.read_text("utf-8")
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "| heads | 5 | 3 | 4 | 1 |" in text
    assert "| train | 7 | 7 | all |" in text
    assert "`heads:3`" in text
    assert "old" not in text
