"""`load_chats`: what is kept, cut and dropped adds up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tercel.chat import EvalPrompt, OverlapIndex, load_chats
from tercel.errors import TercelError

from .test_readers import write_lines
from .test_render import supervised_parts
from .tokenizers_for_tests import make_tokenizer

PAIR = {"prompt": "Hello there", "completion": "I am fine."}


def test_mixed_rows_and_counts(tmp_path: Path) -> None:
    tokenizer = make_tokenizer("qwen3")
    answer = "<think>a</think>b"
    path = write_lines(
        tmp_path / "a.jsonl",
        PAIR,
        {"turns": ["no answer"]},
        {"conversations": []},
        {"text": "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\nTwo.<|im_end|>\n"},
        {"text": "unformatted"},
        {"id": "ids", "p": [1, 2, 3], "g": [4, 5]},
        {"id": "none", "p": [1, 2, 3], "g": []},
        {"id": "long", "prompt": "user " * 100, "completion": "x"},
        {"id": "cut", "prompt": "x", "completion": "user " * 100},
        {
            "id": "two",
            "messages": [{"role": r, "content": c} for r, c in (("user", "q"), ("assistant", answer)) * 2],
        },
    )
    chats, report = load_chats([path], tokenizer, max_length=60)
    assert [chat.id for chat in chats] == ["a-1", "a-4", "ids", "cut", "two#turn1", "two"]
    assert (report.read, report.kept, report.chats, report.truncated) == (10, 5, 6, 1)
    assert report.turns == 6
    assert report.dropped == {
        "no assistant turn": 2,
        "the text does not follow the chat template": 1,
        "no assistant token": 1,
        "no assistant token within the maximum length": 1,
    }
    assert report.read == report.kept + sum(report.dropped.values())
    assert report.tokens == sum(len(chat) for chat in chats)
    assert report.supervised == sum(int(chat.supervised.sum()) for chat in chats)
    assert len(chats[3]) == 60
    assert supervised_parts(chats[1], tokenizer) == ["Two.<|im_end|>"]
    json.dumps(report.to_json())


def test_overlaps_are_dropped_whatever_the_kind_of_row(tmp_path: Path) -> None:
    tokenizer = make_tokenizer("chatml")
    question = "How many lazy dogs did the quick brown fox jump over on that fine day?"
    ids = tokenizer(question)["input_ids"]
    path = write_lines(
        tmp_path / "a.jsonl",
        {"prompt": question.upper(), "completion": "One."},
        {"p": ids, "g": [5]},
        {"text": f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\nTwo.<|im_end|>\n"},
        PAIR,
    )
    against = OverlapIndex.of([EvalPrompt("eval:1", question)])
    chats, report = load_chats([path], tokenizer, max_length=99, against=against)
    assert [chat.id for chat in chats] == ["a-4"]
    assert report.dropped == {"overlaps with an evaluation set": 3}
    assert [overlap.kind for overlap in report.overlaps] == ["exact", "exact", "ngram"]


def test_sources_limit_and_notes(tmp_path: Path) -> None:
    one = write_lines(tmp_path / "one.jsonl", *[PAIR] * 5)
    two = tmp_path / "two.json"
    two.write_text(json.dumps([PAIR] * 5)[:-10], encoding="utf-8")
    _, report = load_chats([one, str(two)], make_tokenizer("chatml"), max_length=99)
    assert report.read == 9
    assert report.notes == (f"{two} is cut off: kept the 4 whole entries before the cut",)
    _, report = load_chats([one, two], make_tokenizer("chatml"), max_length=99, limit=2)
    assert report.read == 4


def test_plain_text_for_a_base_model(tmp_path: Path) -> None:
    tokenizer = make_tokenizer("base")
    path = write_lines(tmp_path / "a.jsonl", {"text": "Hello there"})
    with pytest.raises(TercelError, match="no chat template"):
        load_chats([path], tokenizer, max_length=99)
    (chat,), report = load_chats([path], tokenizer, max_length=99, plain=True)
    assert chat.supervised.tolist() == [False] + [True] * (len(chat) - 1)
    assert report.kept == 1
    conversations = write_lines(tmp_path / "b.jsonl", PAIR)
    with pytest.raises(TercelError, match="no chat template"):
        load_chats([conversations], tokenizer, max_length=99, plain=True)


def test_nothing_left_is_an_error_that_says_why(tmp_path: Path) -> None:
    gemma = make_tokenizer("gemma")
    refused = write_lines(
        tmp_path / "a.jsonl",
        {"messages": [{"role": "user", "content": "x"}] * 2 + [{"role": "assistant", "content": "x"}]},
    )
    with pytest.raises(TercelError, match=r"no assistant tokens are left of the 1 rows of .*a\.jsonl: 1 × the chat"):
        load_chats([refused], gemma, max_length=99)
    unlike = write_lines(tmp_path / "b.jsonl", PAIR)
    with pytest.raises(TercelError, match="unlike the serving prompt"):
        load_chats([unlike], make_tokenizer("r1"), max_length=99)
    with pytest.raises(TercelError, match="within the maximum length"):
        load_chats([unlike], gemma, max_length=2)


def test_wrong_arguments(tmp_path: Path) -> None:
    tokenizer = make_tokenizer("chatml")
    path = write_lines(tmp_path / "a.jsonl", {"id": "x", "p": [1], "g": [len(tokenizer)]})
    with pytest.raises(TercelError, match="the tokens of x do not belong to this tokenizer"):
        load_chats([path], tokenizer, max_length=99)
    with pytest.raises(TercelError, match="at least 2 tokens"):
        load_chats([path], tokenizer, max_length=1)
    with pytest.raises(TercelError, match="no conversations are named"):
        load_chats([], tokenizer, max_length=99)
