"""`tercel data show` and `clean`, run through the command line's own parser on a saved tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tercel.cli.data import app, coloured
from tercel.errors import TercelError

from .test_readers import write_lines
from .test_render import Renderer, talk
from .tokenizers_for_tests import make_tokenizer

QUESTION = "How many lazy dogs did the quick brown fox jump over on that fine day?"


@pytest.fixture
def target(tmp_path: Path) -> str:
    folder = tmp_path / "target"
    make_tokenizer("chatml").save_pretrained(folder)
    return str(folder)


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    return write_lines(
        tmp_path / "chats.jsonl",
        {"id": "one", "prompt": "Hello there", "completion": "I am [red] fine."},
        {"id": "two", "prompt": QUESTION, "completion": "One."},
        {"id": "three", "turns": ["no answer"]},
    )


@pytest.fixture
def evaluation(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "eval.jsonl", {"question_id": 81, "turns": [QUESTION]})


def test_show(tmp_path: Path, target: str, chats: Path, evaluation: Path) -> None:
    counts = tmp_path / "counts.json"
    command = ["show", str(chats), "--target", target, "-n", "1", "--json", str(counts)]
    result = CliRunner().invoke(app, [*command, "--check-overlap", str(evaluation)], catch_exceptions=False)
    assert result.exit_code == 0
    for text in (
        "one",
        "I am [red] fine.<|im_end|>",
        "no assistant turn",
        "two: exact overlap with eval.jsonl:81",
    ):
        assert text in result.output
    report = json.loads(counts.read_text(encoding="utf-8"))
    assert (report["read"], report["kept"]) == (3, 1)
    assert report["dropped"] == {"overlaps with an evaluation set": 1, "no assistant turn": 1}


def test_colours_follow_the_mask() -> None:
    tokenizer = make_tokenizer("chatml")
    (chat,) = Renderer(tokenizer).render(talk("Hello", "fine")).chats
    pieces = list(coloured(chat, tokenizer))
    assert [text for text, style in pieces if style == "bold green"] == ["fine<|im_end|>"]
    assert "".join(text for text, _ in pieces) == tokenizer.decode(chat.tokens)


def test_clean(tmp_path: Path, chats: Path, evaluation: Path) -> None:
    out = tmp_path / "clean.jsonl"
    command = ["clean", str(chats), "--against", str(evaluation), "--out", str(out)]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.exit_code == 0
    assert "1 exact" in result.output
    assert "2 of 3 conversations" in result.output
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [row["id"] for row in rows] == ["one", "three"]
    with pytest.raises(TercelError, match="exists already"):
        CliRunner().invoke(app, command, catch_exceptions=False)


def test_clean_that_leaves_nothing(tmp_path: Path, evaluation: Path) -> None:
    chats = write_lines(tmp_path / "a.jsonl", {"prompt": QUESTION, "completion": "x"})
    out = tmp_path / "clean.jsonl"
    with pytest.raises(TercelError, match="every one of the 1 conversations"):
        CliRunner().invoke(
            app,
            ["clean", str(chats), "--against", str(evaluation), "--out", str(out)],
            catch_exceptions=False,
        )
    assert not out.exists()
