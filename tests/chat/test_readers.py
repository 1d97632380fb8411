"""Every schema that is read, and what is said of files that are faulty."""

from __future__ import annotations

import gzip
import json
import sys
import types
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tercel.chat import (
    Conversation,
    Message,
    RawText,
    TokenizedChat,
    lines,
    read_conversations,
    read_records,
)
from tercel.errors import TercelError


def write_lines(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def turns(conversation: Conversation) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in conversation.messages]


QA = [("user", "Hi"), ("assistant", "Hello é")]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello é"}]},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello é"}]},
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
                {"role": "bot", "content": "Hello é"},
            ]
        },
        {"prompt": "Hi", "completion": "Hello é"},
        {"prompt": "Hi", "response": "Hello é"},
        {
            "prompt": [{"role": "user", "content": "Hi"}],
            "completion": [{"role": "assistant", "content": "Hello é"}],
        },
        {"instruction": "Hi", "input": "", "output": "Hello é"},
    ],
)
def test_schemas(tmp_path: Path, row: dict) -> None:
    (conversation,) = read_conversations(write_lines(tmp_path / "chats.jsonl", row))
    assert turns(conversation) == QA
    assert conversation.id == "chats-1"
    assert conversation.source == "chats"
    (same,) = read_conversations(write_lines(tmp_path / "named.jsonl", {**row, "id": 7, "source": "x"}))
    assert (same.id, same.source) == ("7", "x")


def test_other_schemas(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "a.jsonl",
        {"question_id": 81, "category": "writing", "turns": ["One", "Two"]},
        {"instruction": "Add", "input": "1 2", "output": "3"},
        {
            "system": "Think.",
            "conversations": [{"from": "user", "value": "Hi"}, {"from": "assistant", "value": "x"}],
        },
    )
    first, second, third = read_conversations(path)
    assert (first.id, turns(first)) == ("81", [("user", "One"), ("user", "Two")])
    assert turns(second)[0] == ("user", "Add\n\n1 2")
    assert turns(third)[0] == ("system", "Think.")


def test_tools_and_written_calls(tmp_path: Path) -> None:
    call = {"name": "find", "arguments": {"a": 1}}
    row = {
        "tools": json.dumps([{"name": "find", "parameters": {}}]),
        "messages": [
            {"role": "user", "content": "Find a"},
            {"role": "function_call", "content": json.dumps(call)},
            {"role": "observation", "content": "1"},
            {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": call}]},
        ],
    }
    (conversation,) = read_conversations(write_lines(tmp_path / "a.jsonl", row))
    assert conversation.tools == ({"type": "function", "function": {"name": "find", "parameters": {}}},)
    _, written, tool, given_call = conversation.messages
    assert written.role == given_call.role == "assistant"
    assert written.tool_calls == given_call.tool_calls == ({"type": "function", "function": call},)
    assert tool.role == "tool"


def test_a_written_conversation_reads_back_equal(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    messages = (
        Message("system", "s"),
        Message("user", "u"),
        Message("assistant", "", (call,), "why", (1, 2)),
        Message("tool", "t"),
        Message("assistant", "b"),
    )
    conversation = Conversation("c", messages, "s", (call,))
    assert list(read_conversations(write_lines(tmp_path / "a.jsonl", conversation.to_json()))) == [conversation]


def test_text_and_token_rows(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", {"text": "once"}, {"id": "t", "p": [5, 6], "g": [7]})
    text, tokens = read_records(path)
    assert text == RawText("a-1", "once", "a")
    assert isinstance(tokens, TokenizedChat)
    assert tokens.tokens.tolist() == [5, 6, 7]
    assert tokens.supervised.tolist() == [False, False, True]
    with pytest.raises(TercelError, match="a-1 is preformatted text"):
        list(read_conversations(path))
    only = write_lines(tmp_path / "b.jsonl", {"p": [], "g": [7, 8]})
    (answer,) = read_records(only)
    assert isinstance(answer, TokenizedChat)
    assert answer.supervised.tolist() == [False, True]


def test_gzip_blank_lines_byte_order_mark_and_limit(tmp_path: Path) -> None:
    rows = [json.dumps({"prompt": f"q{i}", "completion": "a"}) for i in range(5)]
    path = tmp_path / "a.jsonl.gz"
    with gzip.open(path, "wt", encoding="utf-8-sig") as stream:
        stream.write("\n" + "\n\n".join(rows))
    ids = [conversation.id for conversation in read_conversations(path)]
    assert ids == ["a-2", "a-4", "a-6", "a-8", "a-10"]
    assert len(list(read_conversations(path, limit=2))) == 2
    assert len(list(read_conversations(path, limit=10**40))) == len(list(read_conversations(path)))
    with pytest.raises(TercelError, match="limit"):
        list(read_conversations(path, limit=0))
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(TercelError, match=r"cut\.jsonl\.gz"):
        list(read_conversations(cut))


@given(block=st.integers(1, 60), cut=st.integers(0, 260))
@settings(max_examples=80, deadline=None)
def test_json_lists_in_blocks_and_cut_off(tmp_path_factory, block: int, cut: int) -> None:
    """Whatever the size of a block and the place of the cut, the whole entries before it are read."""
    rows = [{"id": i, "conversations": [{"from": "human", "value": 'é"]}' * i}]} for i in range(1, 5)]
    entries = [json.dumps(row, ensure_ascii=False) for row in rows]
    whole = " [\n" + ", ".join(entries) + "]\n"
    text = whole[: len(whole) - cut]
    path = tmp_path_factory.mktemp("json") / "list.json"
    path.write_text(text, encoding="utf-8")
    expected = [str(row["id"]) for row, entry in zip(rows, entries, strict=True) if entry in text]
    notes: list[str] = []
    original, lines.BLOCK = lines.BLOCK, block
    try:
        if expected:
            assert [record.id for record in read_records(path, notes=notes)] == expected
        else:
            with pytest.raises(TercelError):
                list(read_records(path, notes=notes))
    finally:
        lines.BLOCK = original
    if expected and cut > 2:
        assert notes == [f"{path} is cut off: kept the {len(expected)} whole entries before the cut"]
    elif cut == 0:
        assert notes == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a", "completion": "b"}\n{"prompt": \n', r"bad\.jsonl, line 2: not JSON"),
        (
            '[{"prompt": "a", "completion": "b"}, {"prompt" 1, "completion": "b"}]',
            r"bad\.jsonl, entry 2: not JSON",
        ),
        ("[1]", r"entry 1: expected a JSON object"),
        ('{"a": 1, "b": 2}', r"line 1: no conversation found; its keys are: a, b"),
        ('{"messages": [{"role": "user"}]}', "line 1, message 1: it has no text"),
        ('{"messages": [{"content": "x"}]}', "line 1, message 1: it has no role"),
        ('{"messages": [{"role": "cat", "content": "x"}]}', "unknown role 'cat'"),
        ('{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', "something other than text"),
        ('{"messages": [{"role": "function_call", "content": "x"}]}', "must be JSON"),
        ('{"messages": ["x"]}', "line 1, message 1: expected an object"),
        ('{"messages": [{"role": "user", "content": "x"}], "tools": "x"}', "tools is not JSON"),
        ('{"p": [1, "a"], "g": []}', 'line 1: "p" must be a list of token ids'),
        ('{"p": [1, true], "g": []}', 'line 1: "p" must be a list of token ids'),
        (
            '{"messages": [{"role": "assistant", "content": "x"}], "answer_ids": []}',
            "each of the 1 assistant",
        ),
        ("", "holds no conversations"),
        ("\n \n", "holds no conversations"),
        ("[]", "holds no conversations"),
    ],
)
def test_faulty_files(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(TercelError, match=message):
        list(read_records(path))


def test_faulty_names(tmp_path: Path) -> None:
    with pytest.raises(TercelError, match=r"there is no file nowhere\.jsonl"):
        list(read_records("nowhere.jsonl"))
    with pytest.raises(TercelError, match=r"there is no file data/chats\.jsonl"):
        list(read_records("data/chats.jsonl"))
    with pytest.raises(TercelError, match="sharegpt, ultrachat-200k"):
        list(read_records("shargpt"))
    with pytest.raises(TercelError, match="is a folder"):
        list(read_records(tmp_path))
    binary = tmp_path / "a.jsonl"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TercelError, match=r"line 1: the byte 0xff is not UTF-8"):
        list(read_records(binary))


def fake_datasets(monkeypatch: pytest.MonkeyPatch, load_dataset) -> None:
    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("ultrachat-200k", ("HuggingFaceH4/ultrachat_200k", "train_sft")),
        ("openthoughts-114k-math", ("open-r1/OpenThoughts-114k-math", "train")),
        ("some/thing", ("some/thing", "train")),
        ("some/thing:test", ("some/thing", "test")),
    ],
)
def test_data_sets_of_the_hub(monkeypatch: pytest.MonkeyPatch, name: str, asked: tuple[str, str]) -> None:
    seen = []

    def load_dataset(repository: str, split: str, streaming: bool) -> list[dict]:
        seen.append((repository, split))
        return [{"prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}]}, {"a": 1}]

    fake_datasets(monkeypatch, load_dataset)
    (conversation,) = read_conversations(name, limit=1)
    assert (turns(conversation), conversation.source) == ([("user", "Hi")], name)
    assert seen == [asked]
    with pytest.raises(TercelError, match=f"{name}, row 2: no conversation found"):
        list(read_conversations(name))


def test_the_hub_out_of_reach_or_the_extra_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*_: object, **__: object) -> None:
        raise ConnectionError("no route\nlong trace")

    fake_datasets(monkeypatch, load_dataset)
    with pytest.raises(TercelError, match=r"cannot read some/thing \(split train\) from the Hub \(no route\)"):
        list(read_records("some/thing"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(TercelError, match=r"pip install 'tercel\[data\]'"):
        list(read_records("some/thing"))
