"""A journal gives what a run wrote, whatever else has come into the file."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import pytest

from tercel import limits
from tercel.draft.history import HeldOut
from tercel.errors import TercelError
from tercel.train.journal import Journal
from tercel.train.plot import plot_curves

STEP = {"step": 2, "loss": 2.5, "accuracy": 0.25, "lr": 1e-3, "grad_norm": 1.0, "tokens": 90, "seconds": 0.5}
EVAL = {"step": 2, "eval": {"alpha": [0.5, 0.25], "tau": 1.6, "steps": 30, "loss": float("nan")}}
DATE = {"step": 0, "rendered_at": "2025-03-05T06:07:08"}
SOUND = [DATE, {**STEP, "step": 1}, STEP, EVAL]


def written(path: Path, *lines: bytes) -> Journal:
    """A journal whose line 5 and those after it are `lines`."""
    path.write_bytes(b"".join(json.dumps(row).encode() + b"\n" for row in SOUND) + b"".join(lines))
    return Journal(path)


def step(**changes: object) -> bytes:
    return json.dumps({**STEP, "step": 3, **changes}).encode() + b"\n"


def evaluation(**changes: object) -> bytes:
    return json.dumps({"step": 3, "eval": {**EVAL["eval"], **changes}}).encode() + b"\n"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"[" * 10_000 + b"\n", "JSON nested more than 64 deep"),
        (b"[1]\n", "[1] is not an object"),
        (b"\xff\xfe\n", "byte 1 is not UTF-8"),
        (b"\0" * 30 + b"\n", "not JSON"),
        (b"\n", "not JSON"),
        (b'"' + b"x" * limits.LINE_BYTES + b'"\n', "longer than 16 MiB"),
        (b'{"step": ' + b"9" * 5000 + b"}\n", "a number of more than 40 digits"),
        (b'{"step": 3, "loss": 1e999, "accuracy": 0}\n', "its loss is inf, not a number"),
        (b'{"step": 3, "\\ud800": 1}\n', "a string that is not text"),
        (b'{"step": 3}\n', "neither a loss nor an evaluation"),
        (b'{"step": 3, "rendered_at": "yesterday"}\n', "neither a loss nor an evaluation"),
        (b'{"step": 3, "loss": 1.0}\n', "a loss without an accuracy"),
        (b'{"no": "step"}\n', "its step is None"),
        (step(step="x"), "its step is 'x', not a whole number"),
        (step(step=True), "its step is True"),
        (step(step=-1), "its step is -1"),
        (step(step=3.5), "its step is 3.5"),
        (step(tokens=None), "its tokens is None, not a number"),
        (step(accuracy="0.5"), "its accuracy is '0.5'"),
        (json.dumps(STEP).encode() + b"\n", "an entry of step 2 again"),
        (json.dumps(EVAL).encode() + b"\n", "an evaluation of step 2 again"),
        (b'{"step": 1, "eval": 3}\n', "eval in the row must be an object, not '3'"),
        (b'{"step": 3, "eval": {"tau": 9.0, "alpha": [1.0]}}\n', "eval in the row has no steps"),
        (evaluation(alpha=0.5), "eval.alpha in the row must be a list"),
        (evaluation(alpha=[0.5, None]), "an entry of eval.alpha in the row must be a number"),
        (evaluation(tau="9; 9"), "eval.tau in the row must be a number, not '9; 9'; it is left out"),
        (evaluation(tau=float("nan")), "a tau or alpha of its evaluation is not a number"),
        (evaluation(alpha=[float("inf")]), "a tau or alpha of its evaluation is not a number"),
        (evaluation(steps="many"), "eval.steps in the row must be a whole number"),
    ],
    ids=lambda value: None if isinstance(value, bytes) else str(value)[:30],
)
def test_what_no_run_wrote_is_left_out_and_told(tmp_path: Path, line: bytes, problem: str) -> None:
    journal = written(tmp_path / "metrics.jsonl", line, step(step=4))
    kept = [json.dumps(row) for row in (*SOUND, json.loads(step(step=4)))]
    assert [json.dumps(row) for row in journal.entries()] == kept
    journal.cut(4)
    (note,) = journal.notes
    assert note.startswith(f"{journal.path}, line 5: ")
    assert problem in note
    assert len(note) < len(str(journal.path)) + 200
    assert journal.path.read_text("utf-8").splitlines() == kept
    assert journal.rendered_at() == datetime(2025, 3, 5, 6, 7, 8)
    evaluations = [HeldOut.from_json(row["eval"], "eval", journal.path) for row in journal.evaluations()]
    assert [held_out.tau for held_out in evaluations] == [1.6]


@pytest.mark.parametrize("torn", [b'{"step": 3, "lo', b"\0" * 40, b"[" * 10_000, b"\xff"])
def test_a_line_that_a_kill_cut_off_is_nobodys_fault(tmp_path: Path, torn: bytes) -> None:
    journal = written(tmp_path / "metrics.jsonl", torn)
    journal.cut(2)
    assert journal.notes == ()
    assert len(journal.path.read_bytes().splitlines()) == len(SOUND)


def test_a_whole_row_without_its_line_end_is_kept(tmp_path: Path) -> None:
    assert written(tmp_path / "metrics.jsonl", step().rstrip()).entries()[-1]["step"] == 3


def test_rows_after_the_step_go_and_several_damaged_lines_are_one_note(tmp_path: Path) -> None:
    for more in (1, 2):
        journal = written(tmp_path / "metrics.jsonl", b"x\n", step(), *[b"y\n"] * more)
        journal.cut(2)
        assert [row["step"] for row in journal.entries()] == [0, 1, 2, 2]
        assert journal.notes[0].endswith(f"it is left out, with {more} more after it")


def test_curves_are_drawn_of_the_rows_that_a_run_goes_on_with(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    odd = b"[" * 10_000 + b"\n" + b"\xff\n" + b'{"step": 3, "loss": 1.0}\n{"step": 1, "eval": 3}\n{"step": 4, "lo'
    plot_curves(written(tmp_path / "metrics.jsonl", odd).path, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 0


def test_a_journal_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = written(tmp_path / "metrics.jsonl")

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(TercelError, match=r"cannot read .*metrics\.jsonl: Permission denied"):
        journal.entries()
