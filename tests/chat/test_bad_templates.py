"""What a template can do to a run: end as one sentence, or be counted, never fill the machine."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tercel import limits
from tercel.chat import (
    Answer,
    Conversation,
    Message,
    Question,
    RegenerateSettings,
    load_chats,
    read_eval_prompts,
    regenerate,
    serving_prompt,
)
from tercel.chat.deadline import DeadlineError, deadline
from tercel.chat.load import TOO_LARGE, UNFIT
from tercel.errors import TercelError
from tests.chat.test_bounds import row, rows, saying
from tests.tiny import CHATML, IM_END, tiny_tokenizer

LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DOUBLES = "{% set n = namespace(x='x' * 99999) %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}"
TEMPLATES = {
    "loops": (LOOPS, "it was stopped after"),
    "doubles": (DOUBLES, "it was stopped after"),
    "recurses": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    "divides": ("{{ 1 // 0 }}", "ZeroDivisionError"),
    "misses": ("{{ messages[7].content.x }}", "has no element 7"),
    "includes": ("{% include 'x' %}", "no loader"),
    "powers": ("{{ 10 ** 10 ** 10 }}", "raises a number to a power"),
    "repeats": ("{{ 'x' * 10000000000 }}", "holds the number 10000000000"),
    "widens": ("{{ '%01000000000d' % 1 }}", "formats a field as wide"),
    "widens again": ("{{ '{:>9999999999}'.format(1) }}", "formats a field as wide"),
    "is none": ("{% for %}", "Expected an expression"),
}


@pytest.mark.parametrize("fault", TEMPLATES)
@pytest.mark.parametrize("inside", ["main", "another thread"])
def test_a_template_that_misbehaves_refuses(monkeypatch: pytest.MonkeyPatch, fault: str, inside: str) -> None:
    monkeypatch.setattr(limits, "RENDER_SECONDS", 0.3 if fault == "loops" else 30)  # the others end, however slowly
    monkeypatch.setattr(limits, "RENDER_BYTES", 1 << 28)
    template, words = TEMPLATES[fault]
    said: list[str] = []

    def ask() -> None:
        with pytest.raises(TercelError) as caught:
            serving_prompt(tiny_tokenizer(chat_template=template), [Message("user", "hi")])
        said.append(str(caught.value))

    if inside == "main":
        ask()
    else:
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
    assert words in said[0]
    assert "\n" not in said[0]


def test_a_deadline_is_over_with_its_block() -> None:
    def runs_for_ever() -> None:
        with deadline(0.05, 1 << 40):
            while True:
                pass

    with pytest.raises(DeadlineError):
        runs_for_ever()
    with deadline(0.05, 1 << 40):
        pass
    until = time.monotonic() + 0.3
    while time.monotonic() < until:  # nothing is raised any more
        pass


def test_a_deadline_of_memory_gives_time_to_end_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was too much is still held while the block ends."""
    monkeypatch.setattr("tercel.chat.deadline.AGAIN", 30.0)
    looks, raised = [0], 0

    def grows_to_eight() -> int:
        looks[0] += 1
        return min(looks[0], 8) << 20

    monkeypatch.setattr("tercel.chat.deadline._process_bytes", grows_to_eight)
    with deadline(60, 4 << 20):
        while looks[0] < 20:
            try:
                time.sleep(0.001)
            except DeadlineError:
                raised += 1
    assert raised == 1


def test_a_deadline_that_was_dropped_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tercel.chat.deadline.AGAIN", 0.05)

    def swallows_the_first() -> None:
        with deadline(0.05, 1 << 40):
            try:
                while True:
                    pass
            except DeadlineError:
                pass
            while True:
                pass

    with pytest.raises(DeadlineError):
        swallows_the_first()


FAULTY = CHATML + "{% if messages[0].content == 'divide' %}{{ 1 // 0 }}{% endif %}"


class Echo:
    """Answers everything at once."""

    def __init__(self) -> None:
        self.keys: list[str] = []

    def submit(self, key: str, question: Question) -> None:
        self.keys.append(key)

    def poll(self) -> list[Answer]:
        answers, self.keys = [Answer(key, (40, IM_END), "stop") for key in self.keys], []
        return answers

    def pending(self) -> int:
        return len(self.keys)

    def generated(self) -> int:
        return 0


def conversations(*questions: str) -> Iterator[Conversation]:
    for number, question in enumerate(questions):
        yield Conversation(str(number), (Message("user", question),), "test")


def test_one_row_that_the_template_fails_on_does_not_end_a_regeneration(tmp_path: Path) -> None:
    report = regenerate(
        conversations("one", "divide", "two"),
        Echo(),
        tmp_path / "out.jsonl",
        tokenizer=tiny_tokenizer(chat_template=FAULTY),
        settings=RegenerateSettings("t", 0.0, 0, 8, 200),
    )
    assert (report.answered, report.failed) == (2, 1)
    assert "ZeroDivisionError" in next(iter(report.reasons))
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 2


def test_such_rows_are_counted_when_chats_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TEXT_CHARACTERS", 2000)
    many = [{"role": role, "content": "x"} for _ in range(600) for role in ("user", "assistant")]
    plain = json.dumps({"text": "x" * 1500})
    texts = saying("divide"), saying("x" * 2001), row(messages=many), saying("z" * 1990), plain
    path = rows(tmp_path / "a.jsonl", *texts)
    chats, report = load_chats([path], tiny_tokenizer(chat_template=FAULTY), max_length=64, plain=True)
    assert [chat.id for chat in chats] == ["good", "a-6"]
    assert report.dropped == {"the chat template refuses the messages": 1, TOO_LARGE: 2, UNFIT: 1}
    assert report.read == report.kept + sum(report.dropped.values())


def test_questions_that_are_no_questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TEXT_CHARACTERS", 2000)
    with pytest.raises(TercelError, match=r"a\.jsonl: turn 1 of a-2 has more than 2,000 characters"):
        read_eval_prompts([rows(tmp_path / "a.jsonl", saying("x" * 2001))])
