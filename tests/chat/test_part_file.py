"""Answers that a stopped run left: gone on with as it left them, for the day that it began on, or refused by line."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tercel.chat import Conversation, Message, regenerate
from tercel.chat.answering import row_problem
from tercel.chat.render import answer_text
from tercel.cli.regenerate import report_lines
from tercel.errors import TercelError
from tests.tiny import CHATML

from .echo import SETTINGS, TOKENIZER, Echo, Killed, asks, lines, run
from .tokenizers_for_tests import make_tokenizer

TOOLS = ({"type": "function", "function": {"name": "look", "parameters": {"default": float("nan")}}},)
PROMPTS = [
    Conversation(
        "a", (Message("system", "Be é."), Message("user", "one", name="Ann"), Message("user", "two")), "t", TOOLS
    ),
    asks("b", "three"),
    asks("c", "four"),
    asks("cut", "five", "word " * 300),
    Conversation("mute", (Message("assistant", "six"),), "test"),
]


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The lines of an unbroken run, by id."""
    out = tmp_path_factory.mktemp("whole") / "out.jsonl"
    run(PROMPTS, Echo(), out)
    found = {json.loads(line)["id"]: line for line in out.read_bytes().splitlines(keepends=True)}
    assert sorted(found) == ["a", "b", "c", "cut"]
    return found


def stopped(folder: Path, part: bytes) -> Path:
    """The output of a run that was killed at its first answer, with other lines in the part file."""
    out = folder / "out.jsonl"
    with pytest.raises(Killed):
        run(PROMPTS, Echo(die_after=0), out)
    out.with_name("out.jsonl.part").write_bytes(part)
    return out


def without(row: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != name}


def said(row: dict[str, Any], text: str) -> dict[str, Any]:
    return {**row, "messages": [*row["messages"][:-1], {"role": "assistant", "content": text}]}


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"rubbish\n", "not JSON"),
        (b"\n", "not JSON"),
        (b"\0" * 50 + b"\n", "not JSON"),
        (b"[" * 10_000 + b"]" * 10_000 + b"\n", "JSON nested more than 64 deep"),
        (b'{"id": "\xe9"}\n', "byte 9 is not UTF-8"),
        (b'{"id": ' + b"9" * 5000 + b"}\n", "a number of more than 40 digits"),
        (b'{"id": "\\udc00"}\n', "a string that is not text"),
        (b"[]\n", "[] is not a conversation with an id"),
        (b'{"messages": []}\n', "is not a conversation with an id"),
        (b'{"id": [1]}\n', "is not a conversation with an id"),
        (b'{"id": "z"}\n', "'z' is none of the prompts"),
        (b'{"id": "a"}\n', "'a' is in line 1 already"),
        (b'{"id": "b"}\n', "its answer_ids are not the token ids"),
    ],
    ids=lambda value: None if isinstance(value, bytes) else value,
)
def test_a_line_that_no_run_left_is_refused(tmp_path: Path, left: dict[str, bytes], line: bytes, problem: str) -> None:
    part = left["a"] + line + left["c"]
    out = stopped(tmp_path, part)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(TercelError) as told:
        run(PROMPTS, Echo(), out)
    assert str(told.value).startswith(f"{out}.part, line 2: ")
    assert problem in str(told.value)
    assert len(str(told.value)) < len(str(out)) + 300
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda row: said(row, "of somebody else"), "not its prompt with the text of its answer_ids"),
        (lambda row: {**row, "messages": row["messages"][::-1]}, "not its prompt with"),
        (lambda row: {**row, "messages": row["messages"][:-1]}, "not its prompt with"),
        (lambda row: {**row, "messages": 1e999}, "not its prompt with"),
        (lambda row: {**row, "more": 1}, "not its prompt with"),
        (lambda row: {**row, "source": "other"}, "not its prompt with"),
        (lambda row: without(row, "tools"), "not its prompt with"),
        (lambda row: {**row, "finish": ["stop"]}, "its finish does not say"),
        (lambda row: {**row, "finish": ["stop", "eos"]}, "its finish does not say"),
        (lambda row: {**row, "finish": [["stop"], "stop"]}, "its finish does not say"),
        (lambda row: without(row, "finish"), "its finish does not say"),
        (lambda row: {**row, "answer_ids": row["answer_ids"][::-1]}, "not its prompt with"),
        (lambda row: {**row, "answer_ids": []}, "its answer_ids are not"),
        (lambda row: {**row, "answer_ids": [[], []]}, "its answer_ids are not"),
        (lambda row: {**row, "answer_ids": [[1], [True]]}, "its answer_ids are not"),
        (lambda row: {**row, "answer_ids": [[1], [-1]]}, "its answer_ids are not"),
        (lambda row: {**row, "answer_ids": [[1], [2**40]]}, "its answer_ids are not"),
        (lambda row: {**row, "answer_ids": [[1], [2**31 - 1]]}, "not its prompt with"),
        (lambda row: {**row, "answer_ids": [[1]] * 3, "finish": ["stop"] * 3}, "more answers than questions"),
    ],
)
def test_a_row_follows_from_its_prompt_and_the_generated_ids(
    left: dict[str, bytes], change: Callable[[dict[str, Any]], dict[str, Any]], problem: str
) -> None:
    def text_of(ids: Any) -> str:
        return answer_text(TOKENIZER, ids)

    row = json.loads(left["a"])
    assert row_problem(row, PROMPTS[0], text_of) == ""
    assert problem in row_problem(change(row), PROMPTS[0], text_of)
    assert row_problem(row, PROMPTS[-1], text_of) == "its prompt asks nothing"


@pytest.mark.parametrize("end", ["", '{"id": "c", "messa', "\0" * 40, "[1]"])
def test_what_a_run_left_is_gone_on_with(tmp_path: Path, left: dict[str, bytes], end: str) -> None:
    """In any order, lines of a full context included, and with a line that a kill cut off."""
    out = stopped(tmp_path, left["cut"] + left["b"] + left["a"] + end.encode())
    report = run(PROMPTS, Echo(3), out)
    assert (report.done_before, report.answered, report.skipped) == (3, 1, 4)
    assert out.read_bytes() == left["cut"] + left["b"] + left["a"] + left["c"]


def test_a_byte_order_mark_is_refused(tmp_path: Path, left: dict[str, bytes]) -> None:
    out = stopped(tmp_path, b"\xef\xbb\xbf" + left["a"])
    with pytest.raises(TercelError, match=r"out\.jsonl\.part, line 1: not JSON \(Unexpected UTF-8 BOM"):
        run(PROMPTS, Echo(), out)


@pytest.mark.parametrize("target", [None, "nowhere"])
def test_a_part_file_that_is_none(tmp_path: Path, target: str | None) -> None:
    part = tmp_path / "out.jsonl.part"
    part.mkdir() if target is None else part.symlink_to(target)
    with pytest.raises(TercelError, match=r"out\.jsonl\.part is not a file; move it away"):
        run(PROMPTS, Echo(), tmp_path / "out.jsonl")


@pytest.mark.parametrize("settings", [b"[" * 10_000, b"[]", b"x", b"\xff", b'{"prompts_sha256": ' + b"9" * 5000 + b"}"])
def test_settings_that_are_none(tmp_path: Path, left: dict[str, bytes], settings: bytes) -> None:
    out = stopped(tmp_path, left["a"])
    (tmp_path / "out.jsonl.settings.json").write_bytes(settings)
    with pytest.raises(TercelError, match=r"out\.jsonl\.settings\.json .*; move it away") as told:
        run(PROMPTS, Echo(), out)
    assert len(str(told.value)) < len(str(out)) + 200


def test_answers_of_two_days_are_asked_for_on_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A template that writes the date writes that of the first run, past midnight and in a resumed run."""
    dated = make_tokenizer("chatml")
    dated.chat_template = "{{ strftime_now('%d %b %Y, %H:%M:%S.%f') ~ '\n' }}" + CHATML
    days = (datetime(2025, 3, day, 6, 7, 8) for day in range(5, 30))
    monkeypatch.setattr("tercel.chat.dates.this_moment", lambda: next(days))
    out, first, second = tmp_path / "out.jsonl", Echo(1, die_after=1), Echo(2)
    prompts = [asks("a", "x"), asks("b", "y")]
    with pytest.raises(Killed):
        regenerate(prompts, first, out, tokenizer=dated, settings=SETTINGS, in_flight=1)
    report = regenerate(prompts, second, out, tokenizer=dated, settings=SETTINGS)
    assert [prompt.partition("\n")[0] for prompt in (*first.prompts, *second.prompts)] == [
        "05 Mar 2025, 06:07:08.000000"
    ] * 2
    assert len(lines(out)) == report.read == 2
    assert report.rendered_at == datetime(2025, 3, 5, 6, 7, 8)
    assert any("all of them use 2025-03-05" in line for line in report_lines(report, out))
    assert json.loads((tmp_path / "out.jsonl.settings.json").read_text("utf-8"))["rendered_at"] == "2025-03-05T06:07:08"


@pytest.mark.parametrize("recorded", [None, "yesterday", "2025-03-05T06:07:08"])
def test_answers_with_and_without_a_date_are_not_mixed(tmp_path: Path, recorded: str | None) -> None:
    """recorded: what the first run is said to have kept of its date, which a template without one does not have."""
    out, dated = tmp_path / "out.jsonl", make_tokenizer("chatml")
    if recorded != "2025-03-05T06:07:08":
        dated.chat_template = "{{ strftime_now('%Y') ~ '\n' }}" + CHATML
    prompts = [asks("a", "x"), asks("b", "y")]
    with pytest.raises(Killed):
        regenerate(prompts, Echo(1, die_after=1), out, tokenizer=dated, settings=SETTINGS, in_flight=1)
    sidecar = tmp_path / "out.jsonl.settings.json"
    sidecar.write_text(json.dumps({**json.loads(sidecar.read_text("utf-8")), "rendered_at": recorded}))
    with pytest.raises(TercelError, match="was begun with rendered_at "):
        regenerate(prompts, Echo(), out, tokenizer=dated, settings=SETTINGS)
