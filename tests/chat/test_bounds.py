"""What a row or a template can do to a run: end as one sentence, or be counted, never fill the machine."""

from __future__ import annotations

import gzip
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
    lines,
    load_chats,
    read_eval_prompts,
    read_records,
    regenerate,
    serving_prompt,
)
from tercel.chat.deadline import DeadlineError, deadline
from tercel.chat.load import TOO_LARGE, UNFIT
from tercel.errors import TercelError
from tercel.measure.tasks import load_task
from tests.tiny import CHATML, IM_END, tiny_tokenizer

GOOD = {"id": "good", "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}
DEEP = "[" * 10_000 + "]" * 10_000
LONG = "9" * 5_000


def rows(path: Path, *texts: str) -> Path:
    path.write_text("\n".join([json.dumps(GOOD), *texts]) + "\n", encoding="utf-8")
    return path


def row(**more: object) -> str:
    return json.dumps({**GOOD, "id": "bad", **more})


def saying(content: str) -> str:
    return json.dumps({"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "x"}]})


BAD_ROWS = {
    "deep": (f'{{"messages": [], "x": {DEEP}}}', "JSON nested more than 64 deep"),
    "nested calls": (row(messages=[{"role": "user", "content": "x", "tool_calls": DEEP}]), "nested more than 64 deep"),
    "digits": (f'{{"x": {LONG}}}', "a number of more than 40 digits"),
    "some digits": (f'{{"x": {LONG[:400]}}}', "a number of more than 40 digits"),
    "surrogate": (row(source="\ud83d"), r"a string that is not text: character 1 is '\ud83d', a lone surrogate"),
    "surrogate key": ('{"\\udc00": 1}', "a string that is not text"),
    "no JSON": ("{", "not JSON (Expecting property name enclosed in double quotes, column 2)"),
}


@pytest.mark.parametrize("fault", BAD_ROWS)
@pytest.mark.parametrize("form", ["lines", "list"])
def test_a_faulty_row_is_told_with_its_place(tmp_path: Path, fault: str, form: str) -> None:
    text, words = BAD_ROWS[fault]
    path = rows(tmp_path / "a.jsonl", text)
    if form == "list":
        path.write_text(f"[{json.dumps(GOOD)},\n{text}, {json.dumps(GOOD)}]", encoding="utf-8")
        words = {"digits": "digits", "deep": "deep", "no JSON": "not JSON"}.get(fault, words)
    with pytest.raises(TercelError) as caught:
        list(read_records(path))
    assert words in str(caught.value)
    assert f"{path}, {'line' if form == 'lines' else 'entry'} 2" in str(caught.value)


@pytest.mark.parametrize("form", ["lines", "list"])
def test_bytes_that_are_no_text_are_told_with_their_row(tmp_path: Path, form: str) -> None:
    good = json.dumps(GOOD).encode()
    bad = good.replace(b"hi", b"h\xff")
    path = tmp_path / "a.json"
    path.write_bytes(good + b"\n" + bad if form == "lines" else b"[" + good + b"," + bad + b"]")
    where = "line 2" if form == "lines" else "entry 2"
    with pytest.raises(TercelError, match=rf"{where}: the byte 0xff is not UTF-8"):
        list(read_records(path))
    if form == "lines":
        with pytest.raises(TercelError, match=rf"{where}: the byte 0xff is not UTF-8"):
            load_task(str(path), [])


def test_a_lone_surrogate_in_a_task(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "fine"}\n\n{"prompt": "\\ud800"}\n')
    with pytest.raises(TercelError, match=r"a\.jsonl, line 3: a string that is not text"):
        load_task(str(path), [])
    with pytest.raises(TercelError, match="not a number of questions"):
        load_task(f"{path}:{LONG}", [])


def test_long_lines_and_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LINE_BYTES", 1 << 20)
    monkeypatch.setattr(lines, "BLOCK", 1 << 18)
    path = rows(tmp_path / "a.jsonl", saying("x" * (1 << 20)), json.dumps(GOOD))
    with pytest.raises(TercelError, match=r"a\.jsonl, line 2: longer than the 1 MiB that a line may have"):
        list(read_records(path))
    path.write_text(f"[{json.dumps(GOOD)},{saying('x' * (1 << 22))}]")
    with pytest.raises(TercelError, match=r"a\.jsonl, entry 2: longer than the 1 MiB"):
        list(read_records(path))


@pytest.mark.parametrize("blank", [b"\n", b" "])
def test_blanks_that_unpack_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blank: bytes) -> None:
    monkeypatch.setattr(limits, "UNPACKED_FREE", 1 << 20)
    path = tmp_path / "a.jsonl.gz"
    with gzip.open(path, "wb") as stream:
        for _ in range(64):
            stream.write(blank * (1 << 18))
    with pytest.raises(TercelError, match=r"unpacks to more than .* MiB, 200 times its size"):
        list(read_records(path))


@pytest.mark.parametrize("form", ["lines", "list"])
def test_gzip_is_told_by_its_bytes(tmp_path: Path, form: str) -> None:
    text = json.dumps(GOOD) if form == "lines" else json.dumps([GOOD])
    (tmp_path / "a.json").write_bytes(gzip.compress(text.encode("utf-8-sig")))
    (tmp_path / "plain.gz").write_text(text)
    (tmp_path / "tasks.jsonl").write_bytes(gzip.compress(json.dumps(GOOD).encode()))
    for name in ("a.json", "plain.gz"):
        assert [record.id for record in read_records(tmp_path / name)] == ["good"]
    assert load_task(str(tmp_path / "tasks.jsonl"), []).name == "tasks"


@pytest.mark.parametrize("damage", ["cut", "bits", "header"])
def test_damaged_gzip(tmp_path: Path, damage: str) -> None:
    packed = bytearray(gzip.compress(json.dumps(GOOD).encode() * 50))
    if damage == "bits":
        packed[20] ^= 0xFF
    (tmp_path / "a.gz").write_bytes(packed[:30] if damage == "cut" else packed[:4] if damage == "header" else packed)
    with pytest.raises(TercelError, match=r"cannot read .*a\.gz: .*is the file whole"):
        list(read_records(tmp_path / "a.gz"))


@pytest.mark.parametrize("rest", ["[]", json.dumps([GOOD]), "x", f"\n\n{json.dumps(GOOD)}"])
def test_nothing_behind_a_list_is_dropped(tmp_path: Path, rest: str) -> None:
    (tmp_path / "a.json").write_text(json.dumps([GOOD]) + rest)
    with pytest.raises(TercelError, match=r"entry 2: the list has ended before it, but .* follows"):
        list(read_records(tmp_path / "a.json"))


@pytest.mark.parametrize("between", [" ", "", "\n"])
def test_entries_without_a_comma_between_are_no_list(tmp_path: Path, between: str) -> None:
    row = json.dumps({"messages": [{"role": "user", "content": "hi"}]})
    path = tmp_path / "chats.json"
    path.write_text(f"[{row}{between}{row}]", encoding="utf-8")
    with pytest.raises(TercelError, match=r"chats.json, entry 2: not JSON .a comma is missing before it.; repair"):
        list(read_records(path))


def test_an_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = rows(tmp_path / "a.jsonl")

    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(TercelError, match=r"cannot read .*a\.jsonl: Permission denied"):
        list(read_records(path))
    with pytest.raises(TercelError, match="there is no file"):
        list(read_records("x" * 300))


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
