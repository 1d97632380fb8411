"""Prompts to be answered: from several sources, without those answered elsewhere, in an order that batches well."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tercel.chat import Answer, RegenerateReport, regenerate
from tercel.chat.prompts import WINDOW, answered_ids, batched, read_prompts
from tercel.cli.consoles import PlainConsole
from tercel.cli.regenerate import AnswerProgress, report_lines
from tercel.errors import TercelError

from .echo import SETTINGS, TOKENIZER, Echo, asks, lines, run


def jsonl(path: Path, *rows: dict) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_several_sources_and_the_ids_of_answers_in_any_format(tmp_path: Path) -> None:
    one = jsonl(tmp_path / "one.jsonl", *({"id": f"a{i}", "turns": ["x"]} for i in range(3)))
    two = jsonl(tmp_path / "two.jsonl", *({"id": f"b{i}", "turns": ["x"]} for i in range(3)))
    assert [c.id for c in read_prompts([one, two], limit=2)] == ["a0", "a1", "b0", "b1"]
    ids = jsonl(tmp_path / "ids.jsonl", {"id": "a1", "p": [1, 2], "g": [3]})
    assert answered_ids([ids, two]) == {"a1", "b0", "b1", "b2"}


def test_what_another_file_has_is_not_asked(tmp_path: Path) -> None:
    out, echo = tmp_path / "out.jsonl", Echo()
    prompts = [asks(f"c{i}", f"question {i}") for i in range(5)]
    report = regenerate(prompts, echo, out, tokenizer=TOKENIZER, settings=SETTINGS, answered={"c1", "c3", "other"})
    assert {row["id"] for row in lines(out)} == {"c0", "c2", "c4"}
    assert (report.answered, report.skipped, report.elsewhere, report.read) == (3, 2, 2, 5)
    assert "3 answered + 0 failed + 2 skipped = 5 read" in report_lines(report, out)
    assert "2 of the skipped are answered in the files of --answered" in report_lines(report, out)
    assert len(echo.prompts) == 3
    ids = {f"c{i}" for i in range(5)}
    with pytest.raises(TercelError, match="all of the 5 prompts are answered in other files"):
        regenerate(prompts, echo, tmp_path / "b", tokenizer=TOKENIZER, settings=SETTINGS, answered=ids)


def test_prompts_of_like_length_are_asked_together(tmp_path: Path) -> None:
    in_flight = 3
    prompts = [asks(f"c{i}", "word " * (1 + 7 * i % 24)) for i in range(2 * WINDOW * in_flight)]
    ordered = batched(prompts, in_flight)
    size = WINDOW * in_flight
    for start in (0, size):
        window = ordered[start : start + size]
        assert {c.id for c in window} == {c.id for c in prompts[start : start + size]}
        lengths = [len(c.messages[0].content) for c in window]
        assert lengths == sorted(lengths, reverse=True)
    echo = Echo()
    asked: list[int] = []
    submit = echo.submit
    echo.submit = lambda key, question: (asked.append(len(question.prompt_ids)), submit(key, question))[1]  # type: ignore[method-assign]
    run(prompts, echo, tmp_path / "out.jsonl")
    assert asked[:size] == sorted(asked[:size], reverse=True)


def test_progress_tells_rates_and_the_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    with AnswerProgress(PlainConsole(), clock=lambda: now[0]) as progress:
        for second in (20.0, 100.0, 110.0, 200.0):
            now[0] = second
            answered = int(second // 10)
            counts = {"failed": 0, "turns": answered, "tokens": 40 * answered, "cut": 0}
            more = {"made": 50 * answered, "tokens_left": 2000.0 - 50 * answered if answered > 5 else None}
            progress.show(RegenerateReport(140, answered, skipped=100, done_before=60, elsewhere=40, **counts, **more))
    shown = [line for line in capsys.readouterr().out.splitlines() if "conversations" in line]
    assert shown == [  # a line a minute; what was there before does not count
        "110 of 140 conversations  0.10 answers/s  5 tokens/s  0:05:00 left",
        "120 of 140 conversations  0.10 answers/s  5 tokens/s  0:03:20 left",
    ]


class Slow(Echo):
    """Makes a token of every answer at a time, and ends them all after `length`; says nothing in between."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length

    def poll(self) -> list[Answer]:
        self.made += len(self.waiting)
        if self.made % (self.length * len(self.waiting)):
            return []
        done, self.waiting = self.waiting, []
        return [Answer(key, (7,) * self.length, "length") for key, _ in done]


def test_tokens_count_as_they_are_made_and_the_time_left_is_theirs(tmp_path: Path) -> None:
    told: list[RegenerateReport] = []
    prompts = [asks("a", "x"), *(asks(f"c{i}", "x", "y") for i in range(5))]
    regenerate(
        prompts, Slow(4), tmp_path / "out", tokenizer=TOKENIZER, settings=SETTINGS, in_flight=2, on_progress=told.append
    )
    assert [report.made for report in told[:5]] == [2, 4, 6, 8, 10]
    assert [report.tokens for report in told[:5]] == [0, 0, 0, 8, 8]
    assert told[2].tokens_left is None
    assert told[3].tokens_left == pytest.approx(9 * 4)
    assert told[4].tokens_left == pytest.approx(9 * 5 - 2)  # answers seem to be longer until the next ones end
    assert told[-1].tokens_left == 0
    assert told[-1].made == told[-1].tokens == 11 * 4
