"""Regeneration with a responder made for the tests: order, context, kill and resume, failures."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tercel.chat import (
    Answer,
    Conversation,
    Message,
    Renderer,
    read_conversations,
    regenerate,
    serving_prompt,
)
from tercel.errors import TercelError

from .echo import SETTINGS, TOKENIZER, Echo, Killed, asks, lines, run
from .test_readers import turns
from .tokenizers_for_tests import make_tokenizer


def test_every_user_turn_is_answered_in_context(tmp_path: Path) -> None:
    source = Conversation(
        "c",
        (
            Message("system", "Be."),
            Message("user", "one"),
            Message("assistant", "of the source"),
            Message("tool", "also of the source"),
            Message("user", "two"),
            Message("user", "three"),
            Message("assistant", "last of the source"),
        ),
        "test",
    )
    out, echo = tmp_path / "out.jsonl", Echo()
    report = run([source], echo, out)
    (row,) = lines(out)
    expected = [
        ("system", "Be."),
        ("user", "one"),
        ("assistant", "re: one"),
        ("user", "two"),
        ("assistant", "re: two"),
        ("user", "three"),
        ("assistant", "re: three"),
    ]
    (conversation,) = read_conversations(out)
    assert turns(conversation) == expected
    assert (row["id"], row["source"], row["finish"]) == ("c", "test", ["stop"] * 3)
    messages = [Message(role, content) for role, content in expected]
    served = [TOKENIZER.decode(serving_prompt(TOKENIZER, messages[:at])) for at in (2, 4, 6)]
    assert echo.prompts == served
    assert (report.read, report.answered, report.turns, report.cut) == (1, 1, 3, 0)
    assert report.tokens == sum(map(len, row["answer_ids"]))
    (chat,) = Renderer(TOKENIZER).render(conversation).chats
    assert chat.supervised.sum() == report.tokens


def test_counts_reasons_and_conversations_in_flight(tmp_path: Path) -> None:
    prompts = [asks(f"c{i}", f"question {i}", "bad" if i == 4 else "more") for i in range(9)]
    prompts += [
        asks("long", "word " * 300),
        asks("late", "short", "word " * 300),
        Conversation("none", (Message("assistant", "x"), Message("system", "s")), "test"),
        asks("c0", "the same id again"),
    ]
    out, echo = tmp_path / "out.jsonl", Echo(1, fail="bad")
    seen = []
    report = regenerate(
        prompts, echo, out, tokenizer=TOKENIZER, settings=SETTINGS, in_flight=3, on_progress=seen.append
    )
    assert echo.most == 3
    assert report.answered + report.failed + report.skipped == report.read == 13
    assert (report.answered, report.failed, report.skipped, report.done_before) == (10, 1, 2, 0)
    assert report.reasons == {"out of memory": 1, "the prompt exceeds the context": 1, "no user turn": 1}
    assert seen[-1] == report
    rows = {row["id"]: row for row in lines(out)}
    assert len(rows) == 10
    assert [m["content"] for m in rows["late"]["messages"]] == ["short", "re: short"]
    assert rows["c0~2"]["messages"][0]["content"] == "the same id again"
    assert "c4" not in rows
    assert not list(tmp_path.glob("*.part"))


@given(die_after=st.integers(0, 14), torn=st.integers(0, 40), seed=st.integers(0, 5))
@settings(max_examples=40, deadline=None)
def test_kill_and_resume(tmp_path_factory, die_after: int, torn: int, seed: int) -> None:
    """Killed anywhere, with a torn last line or none, a second run gives what one run gives."""
    folder = tmp_path_factory.mktemp("kill")
    prompts = [asks(f"c{i}", f"a {i}", f"b é {i}") for i in range(7)]
    out, part = folder / "out.jsonl", folder / "out.jsonl.part"
    with pytest.raises(Killed):
        run(prompts, Echo(seed, die_after=die_after - 1 if die_after == 14 else die_after), out)
    assert not out.exists()
    done = len(part.read_bytes().splitlines())
    if torn:
        with part.open("ab") as stream:
            stream.write(json.dumps({"id": "c6", "messages": "é" * 40}, ensure_ascii=False).encode()[:torn])
    echo = Echo(seed + 1)
    report = run(prompts, echo, out)
    assert (report.done_before, report.answered) == (done, 7 - done)
    assert report.answered + report.failed + report.skipped == report.read == 7
    assert len(echo.prompts) == 2 * report.answered
    whole = folder / "whole.jsonl"
    run(prompts, Echo(9), whole)
    by_id = [sorted(lines(path), key=lambda row: row["id"]) for path in (out, whole)]
    assert by_id[0] == by_id[1]


def test_failed_conversations_are_tried_again_by_a_resumed_run(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    prompts = [asks("good", "x"), asks("ill", "bad"), asks("last", "y")]
    with pytest.raises(Killed):
        run(prompts, Echo(0, fail="bad", die_after=2), out)
    report = run(prompts, Echo(0), out)
    assert report.failed == 0
    assert {row["id"] for row in lines(out)} == {"good", "ill", "last"}


def begun(out: Path) -> list[Conversation]:
    """The prompts of a run that was killed when the first of two was answered."""
    prompts = [asks("a", "x"), asks("b", "y")]
    with pytest.raises(Killed):
        run(prompts, Echo(1, die_after=1), out)
    assert len(lines(out.with_name(out.name + ".part"))) == 1
    return prompts


def test_other_settings_or_prompts_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    prompts = begun(out)
    with pytest.raises(TercelError, match=r"was begun with temperature 0\.0, not 0\.5"):
        run(prompts, Echo(), out, temperature=0.5)
    with pytest.raises(TercelError, match=r"was begun with template_arguments None, not \{'style': 'x'\}"):
        run(prompts, Echo(), out, template_arguments={"style": "x"})
    with pytest.raises(TercelError, match="was begun with other prompts; continue with those"):
        run([asks("a", "x"), asks("b", "z")], Echo(), out)
    with pytest.raises(TercelError, match="prompts 2, not 3"):
        run([*prompts, asks("c", "z")], Echo(), out)
    (tmp_path / "out.jsonl.settings.json").unlink()
    before = (tmp_path / "out.jsonl.part").read_bytes()
    with pytest.raises(TercelError, match=r"has no out\.jsonl\.settings\.json beside it"):
        run(prompts, Echo(), out)
    assert (tmp_path / "out.jsonl.part").read_bytes() == before


def edited(tokenizer: Any) -> None:
    tokenizer.chat_template += "{# a word more #}"


def of_several(tokenizer: Any) -> None:
    tokenizer.chat_template = {"default": tokenizer.chat_template, "tool_use": "{{ tools }}"}


def with_an_argument(tokenizer: Any) -> None:
    tokenizer.chat_template = "{% set style = 'x' %}" + tokenizer.chat_template


def with_another_token(tokenizer: Any) -> None:
    tokenizer.pad_token = "a"


@pytest.mark.parametrize("change", [edited, of_several, with_an_argument, with_another_token])
def test_prompts_of_two_templates_are_not_mixed(tmp_path: Path, change: Callable[[Any], None]) -> None:
    out = tmp_path / "out.jsonl"
    prompts = begun(out)
    before = (tmp_path / "out.jsonl.part").read_bytes()
    other = make_tokenizer("chatml")
    change(other)
    with pytest.raises(TercelError, match="another chat template, or other special tokens; continue with those"):
        regenerate(prompts, Echo(), out, tokenizer=other, settings=SETTINGS)
    assert (tmp_path / "out.jsonl.part").read_bytes() == before
    assert run(prompts, Echo(), out).answered == 1  # the one that it was begun with goes on


@pytest.mark.parametrize("killed", [False, True])
def test_a_run_without_an_answer_binds_nobody(tmp_path: Path, killed: bool) -> None:
    out = tmp_path / "out.jsonl"
    with pytest.raises(Killed if killed else TercelError):
        run([asks("a", "x")], Echo(die_after=0) if killed else Echo(fail="x"), out)
    if not killed:
        assert list(tmp_path.iterdir()) == []
    run([asks("a", "another question")], Echo(), out, temperature=0.5)
    assert json.loads((tmp_path / "out.jsonl.settings.json").read_text())["temperature"] == 0.5


@pytest.mark.parametrize("name", ["out.jsonl.settings.json", "out.jsonl.part"])
def test_files_of_somebody_else_are_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("[1, 2]")  # no line end: as a download that stopped
    with pytest.raises(TercelError, match=re.escape(name)):
        run([asks("a", "x")], Echo(), tmp_path / "out.jsonl")
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {name: "[1, 2]"}


def test_only_one_process_answers_into_a_file(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"

    class Second(Echo):
        def poll(self) -> list[Answer]:
            with pytest.raises(TercelError, match=rf"out.jsonl is being written by another process .*{os.getpid()}"):
                run([asks("a", "x")], Echo(), out)
            return super().poll()

    run([asks("a", "x")], Second(), out)
    assert {p.name for p in tmp_path.iterdir()} == {"out.jsonl", "out.jsonl.settings.json"}


def test_a_link_is_followed_and_what_is_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "disk" / "real.jsonl")
    run([asks("a", "x")], Echo(), tmp_path / "link.jsonl")
    assert (tmp_path / "link.jsonl").is_symlink()
    assert len(lines(tmp_path / "disk" / "real.jsonl")) == 1
    for name in ("-", "/dev/null"):
        with pytest.raises(TercelError, match="is not a file"):
            run([asks("a", "x")], Echo(), Path(name))


@pytest.mark.parametrize("length", [246, 300])  # the settings' name is too long, and the file's own
def test_names_that_are_too_long(tmp_path: Path, length: int) -> None:
    with pytest.raises(TercelError, match="File name too long"):
        run([asks("a", "x")], Echo(), tmp_path / ("n" * length))
    assert list(tmp_path.iterdir()) == []


def test_cut_answers_go_on(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    report = run([asks("a", "x", "y")], Echo(finish="length"), out)
    assert report.cut == report.turns == 2
    (row,) = lines(out)
    assert row["finish"] == ["length", "length"]
    assert row["messages"][-1]["content"] == "re: y"
    (chat,) = Renderer(TOKENIZER).render(next(read_conversations(out))).chats
    assert TOKENIZER.eos_token_id not in chat.tokens[chat.supervised]  # it was never generated


class Wrong(Echo):
    def __init__(self, *answers: Answer):
        super().__init__()
        self.answers = list(answers)

    def poll(self) -> list[Answer]:
        return self.answers

    def pending(self) -> int:
        return 0


@pytest.mark.parametrize(
    ("respond", "message"),
    [
        (Wrong(), "returned nothing with 1 conversations unanswered"),
        (Wrong(Answer("z", (1,), "stop")), "answered 'z', which was not asked"),
        (Wrong(Answer("a", (1,), "eos")), "unknown finish 'eos'"),
        (
            Wrong(Answer("a", (), "stop")),
            "none of the 1 conversations was answered: an answer without tokens",
        ),
        (Echo(fail="x"), "none of the 1 conversations was answered: out of memory"),
    ],
)
def test_responders_that_break_the_rules(tmp_path: Path, respond, message: str) -> None:
    with pytest.raises(TercelError, match=message):
        run([asks("a", "x")], respond, tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


def test_wrong_arguments(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with pytest.raises(TercelError, match="no prompts to answer"):
        run([], Echo(), out)
    with pytest.raises(TercelError, match="in flight"):
        regenerate([asks("a", "x")], Echo(), out, tokenizer=TOKENIZER, settings=SETTINGS, in_flight=0)
    with pytest.raises(TercelError, match="no chat template"):
        regenerate([asks("a", "x")], Echo(), out, tokenizer=make_tokenizer("base"), settings=SETTINGS)
    out.write_text("mine", encoding="utf-8")
    with pytest.raises(TercelError, match="exists already"):
        run([asks("a", "x")], Echo(), out)
    assert out.read_text(encoding="utf-8") == "mine"
