from __future__ import annotations

import json
from pathlib import Path

import pytest

from tercel.chat import Message
from tercel.errors import TercelError
from tercel.measure.tasks import (
    Question,
    first_prompts,
    load_task,
    parse_tasks,
    prompt_ids,
    question_messages,
)
from tests.tiny import tiny_tokenizer


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write(tmp_path / "eval" / "sums.jsonl", *({"question_id": i, "turns": [f"{i} + 1?"]} for i in range(10)))
    write(tmp_path / "eval" / "extra" / "far.jsonl", {"prompt": "far?"})
    write(tmp_path / "talk.jsonl", {"question_id": "t", "turns": ["Hello", "And then?"], "reference": ["x"]})
    return tmp_path


def write(path: Path, *rows: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return path


def test_a_name_is_looked_up_in_the_data_folders(data: Path) -> None:
    task = load_task("sums", [data])
    assert task.name == "sums"
    assert [q.id for q in task.questions] == [str(i) for i in range(10)]
    assert load_task("sums", [data / "eval"]) == task
    assert load_task("far", [data]).questions[0].turns == ("far?",)
    assert load_task("talk", [data]).questions == (Question("t", ("Hello", "And then?")),)


def test_a_count_takes_the_first(data: Path) -> None:
    assert [q.id for q in load_task("sums:4", [data]).questions] == ["0", "1", "2", "3"]
    assert len(load_task("sums:10", [data]).questions) == 10


def test_a_file_of_the_users_own(tmp_path: Path) -> None:
    path = write(
        tmp_path / "own.jsonl",
        {
            "id": "a",
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "One?"},
                {"role": "assistant", "content": "1"},
                {"role": "user", "content": "Two?"},
            ],
        },
        "",
        {"prompt": "Three?", "completion": "3"},
    )
    task = load_task(f"{path}:2", [])
    assert task.name == "own"
    assert task.questions[0] == Question("a", ("One?", "Two?"), "Be brief.")
    assert task.questions[1] == Question("own-3", ("Three?",))


def test_what_follows_a_tool_is_left_out(tmp_path: Path) -> None:
    row = {
        "tools": [{"name": "look", "parameters": {}}],
        "messages": [
            {"role": "user", "content": "Look it up."},
            {"role": "function_call", "content": '{"name": "look", "arguments": {}}'},
            {"role": "tool", "content": "found"},
            {"role": "user", "content": "Thanks."},
        ],
    }
    (question,) = load_task(str(write(tmp_path / "tools.jsonl", row)), []).questions
    assert question.turns == ("Look it up.",)
    assert question.tools == ({"type": "function", "function": {"name": "look", "parameters": {}}},)


def test_the_demo_is_built_in() -> None:
    task = load_task("demo", [])
    assert len(task.questions) >= 10
    assert len({q.id for q in task.questions}) == len(task.questions)
    assert any(len(q.turns) == 2 for q in task.questions)
    assert len(load_task("demo:3", []).questions) == 3


def test_several_tasks(data: Path) -> None:
    tasks = parse_tasks("sums:2, demo:1", [data])
    assert [(task.name, len(task.questions)) for task in tasks] == [("sums", 2), ("demo", 1)]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("sum", r"no task sum in .* \(found: demo, far, sums, talk\); did you mean sums"),
        ("none.jsonl", "no task file none.jsonl"),
        ("sums:x", "'x' is not a number"),
        ("sums:0", "'0' is not a number"),
        ("sums:11", "has 10 questions, not the 11"),
        ("sums,sums:2", "named twice"),
        (" , ", "no task is named"),
    ],
)
def test_unknown_tasks_are_refused(data: Path, spec: str, message: str) -> None:
    with pytest.raises(TercelError, match=message):
        parse_tasks(spec, [data])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"turns": ["cut', "line 2: not JSON"),
        ('{"turns": [3]}', "line 2"),
        ('{"turns": []}', "line 2: the question is empty"),
        ('{"prompt": 5}', "line 2"),
        ('{"text": "plain"}', "line 2: no question found"),
        ("[1, 2]", "line 2"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path / "bad.jsonl", {"prompt": "fine"}, line)
    with pytest.raises(TercelError, match=message) as caught:
        load_task(str(path), [])
    assert str(path) in str(caught.value)


def test_empty_and_unreadable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TercelError, match="holds no question"):
        load_task(str(write(tmp_path / "empty.jsonl", "")), [])
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TercelError, match="line 1: the byte 0xff is not UTF-8"):
        load_task(str(tmp_path / "bytes.jsonl"), [])


def test_messages_of_a_later_turn_hold_the_answers() -> None:
    question = Question("q", ("One?", "Two?"), "Be brief.")
    assert question_messages(question) == (Message("system", "Be brief."), Message("user", "One?"))
    assert question_messages(question, ["1"])[1:] == (
        Message("user", "One?"),
        Message("assistant", "1"),
        Message("user", "Two?"),
    )


def test_prompts_follow_the_template_or_are_plain() -> None:
    question = Question("q", ("a b", "c"))
    chat = tiny_tokenizer()
    text = chat.decode(prompt_ids(chat, question, ["x"]))
    assert text == (
        "<|im_start|>user\na b<|im_end|>\n<|im_start|>assistant\nx<|im_end|>\n"
        "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
    )
    plain = tiny_tokenizer(chat_template=None)
    assert plain.decode(prompt_ids(plain, question, ["x"])) == "a b\n\nx\n\nc"
    task = load_task("demo:2", [])
    prompts = first_prompts(chat, [task])
    assert [prompt.id for prompt in prompts] == [f"demo/{q.id}" for q in task.questions]
