from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercel.chat import Conversation, EvalPrompt, Message, OverlapIndex, find_overlaps, read_eval_prompts
from tercel.errors import TercelError

from .test_readers import write_lines

QUESTION = "Write a function that returns the sum of the squares of all even numbers in a list, please."


def asking(text: str, role: str = "user", id: str = "c") -> Conversation:
    return Conversation(id, (Message("user", "first"), Message("assistant", "x"), Message(role, text)), "test")


def kinds(*texts: str, eval_text: str = QUESTION, n: int = 13) -> list[str | None]:
    index = OverlapIndex.of([EvalPrompt("e", "another prompt"), EvalPrompt("e2", eval_text)], n)
    found = [index.find("c", text) for text in texts]
    return [overlap and overlap.kind for overlap in found]


def test_kinds() -> None:
    words = QUESTION.split()
    assert kinds(QUESTION.upper().replace(" ", "\n") + "!!") == ["exact"]
    assert kinds(QUESTION.replace("please", "quickly")) == ["near"]
    assert kinds("Once upon a time. " + " ".join(words[2:15]) + " and many, many other things besides.") == ["ngram"]
    assert kinds(" ".join(words[2:14]) + " but then it goes on in quite another way") == [None]
    assert kinds("Write a function that returns the weather", "") == [None, None]
    assert kinds(" ".join(words[2:6]) + " or not", n=4) == ["ngram"]


def test_scripts_without_spaces_count_by_character() -> None:
    chinese = "请写一个函数返回列表中所有偶数的平方和并且解释它的复杂度"
    assert kinds("你好！" + chinese[:13] + "，谢谢你的帮助，祝你今天过得愉快", eval_text=chinese) == ["ngram"]
    assert kinds("你好！" + chinese[:9], eval_text=chinese) == [None]


def test_report_counts_and_roles() -> None:
    conversations = [
        asking(QUESTION, id="a"),
        asking(QUESTION, role="system", id="b"),
        asking(QUESTION, role="assistant", id="c"),
        asking("unrelated", id="d"),
        asking(QUESTION + " Thank you", id="e"),
    ]
    report = find_overlaps(conversations, [EvalPrompt("e", QUESTION)])
    assert report.read == 5
    assert [conversation.id for conversation in report.kept] == ["c", "d"]
    assert [overlap.id for overlap in report.overlaps] == ["a", "b", "e"]
    assert report.counts == {"exact": 2, "near": 1}
    assert report.overlaps[0].eval_id == "e"


def test_evaluation_files(tmp_path: Path) -> None:
    turns = write_lines(tmp_path / "mt.jsonl", {"question_id": 81, "turns": ["One", "Two"]})
    messages = write_lines(
        tmp_path / "m.jsonl",
        {"id": "x", "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "Three"}]},
    )
    assert read_eval_prompts([turns, messages]) == [
        EvalPrompt("mt.jsonl:81, turn 1", "One"),
        EvalPrompt("mt.jsonl:81, turn 2", "Two"),
        EvalPrompt("m.jsonl:x, turn 1", "Three"),
    ]


def test_wrong_arguments() -> None:
    with pytest.raises(TercelError, match="at least 2 words"):
        OverlapIndex.of([EvalPrompt("e", "x")], n=1)
    with pytest.raises(TercelError, match="no prompts"):
        OverlapIndex.of([EvalPrompt("e", "!?")])


TEXT = st.lists(st.sampled_from(["alpha", "beta", "gamma", "one", "two"]), min_size=1, max_size=25).map(" ".join)


@given(TEXT, TEXT)
def test_a_shared_run_is_found_exactly_when_there_is_one(left: str, right: str) -> None:
    n = 5
    found = OverlapIndex.of([EvalPrompt("e", left)], n).find("c", right)
    runs = [{tuple(t.split()[i : i + n]) for i in range(len(t.split()) - n + 1)} for t in (left, right)]
    shares = bool(runs[0] & runs[1])
    assert (found is not None) >= (shares or left == right)
    if found is not None and found.kind == "ngram":
        assert shares
        assert found.shared in left
        assert found.shared in right


@given(TEXT)
def test_a_prompt_always_overlaps_with_itself(text: str) -> None:
    found = OverlapIndex.of([EvalPrompt("e", text)]).find("c", f" {text.upper()}. ")
    assert found is not None
    assert found.kind == "exact"
