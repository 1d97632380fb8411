"""Settings that cannot work, the learning rate, and whose folder it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tercel.errors import TercelError
from tercel.train.config import RunFolder, TrainConfig


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"epochs": 0}, "epochs must be at least 1, not 0"),
        ({"max_length": 0}, "max_length must be at least 1"),
        ({"loss": "smooth"}, "loss must be one of soft, hard, lk, not 'smooth'"),
        ({"oov": ""}, "oov must be one of drop, keep"),
        ({"average": "batch"}, "average must be one of sequence, token"),
        ({"eval_share": 1.0}, "eval_share must lie between 0 and 1"),
        ({"lr": 0.0}, "lr must be positive"),
        ({"lr": float("nan")}, "lr must be positive"),
        ({"clip": -1.0}, "clip must be positive"),
        ({"warmup": 2.0}, "warmup must lie between 0 and 1"),
        ({"decay": -0.1}, "decay must lie between 0 and 1"),
        ({"seed": 2**64}, r"seed must lie between 0 and 2..40 - 1"),
        ({"draft_vocab": -5}, "draft_vocab must be at least 0, but is -5"),
        ({"weight_decay": float("nan")}, "weight_decay must be at least 0, but is nan"),
    ],
)
def test_impossible_settings(wrong, words):
    with pytest.raises(TercelError, match=words):
        TrainConfig(**wrong)


def test_learning_rate_warms_up_and_falls():
    config = TrainConfig(lr=1.0, warmup=0.1, final_lr=0.1)
    rates = [config.learning_rate(step, 100) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert rates[10] == pytest.approx(1.0)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[55] == pytest.approx(0.55)
    assert 0.1 < rates[99] < 0.11
    assert config.learning_rate(0, 1) == 1.0


def test_the_key_changes_with_what_is_learned_only():
    base = TrainConfig().digest("d", "t")
    assert TrainConfig(eval_every=7, save_every=3).digest("d", "t") == base
    others = {
        TrainConfig(lr=1e-4).digest("d", "t"),
        TrainConfig().digest("e", "t"),
        TrainConfig().digest("d", "u"),
    }
    assert len(others | {base}) == 4


def test_the_papers_formula_and_the_default():
    assert [TrainConfig(decay=0.5).objective.step_weight(s) for s in range(3)] == [1, 0.5, 0.25]
    assert TrainConfig(decay=0.0, ttt_steps=4).objective.step_weight(3) == 0.25


def taken(folder: Path) -> None:
    with RunFolder(folder).held():
        pass


# What people have in folders; the first three were once taken for a run, and lost.
SOMEBODYS = [
    ["training/notes.txt", "src/main.c", ".git/HEAD"],
    ["training/state.pt", "thesis.tex"],
    ["tercel.json"],
    ["config.json", "model.safetensors"],
    ["thesis.tex"],
    [".hidden"],
]


@pytest.mark.parametrize("names", SOMEBODYS)
def test_a_folder_that_no_run_made_is_never_touched(tmp_path, names):
    out = tmp_path / "out"
    for name in names:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("years of work")
    with pytest.raises(TercelError, match=r"is not empty and holds no training run .*; choose another --out"):
        taken(out)
    assert {str(p.relative_to(out)): p.read_text() for p in out.rglob("*") if p.is_file()} == dict.fromkeys(
        names, "years of work"
    )


def test_a_run_of_an_earlier_version_is_refused_and_kept(tmp_path):
    for name in ("training/state.pt", "tercel.json", "model.safetensors"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    with pytest.raises(TercelError, match="holds a run of an earlier version"):
        taken(tmp_path)


def test_a_place_that_cannot_be_used_is_told(tmp_path):
    (tmp_path / "file").write_text("x")
    for out, message in (
        (tmp_path / "file", "is a file; choose another --out"),
        (tmp_path / "file" / "below", "is a file; choose another --out"),
        (tmp_path / ("n" * 300), "File name too long"),
        (Path("/proc/run"), "cannot write /proc/run"),
    ):
        with pytest.raises(TercelError, match=message):
            taken(out)


def test_an_empty_folder_is_free_and_stays_empty_if_nothing_comes_of_it(tmp_path):
    taken(tmp_path / "new")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / ".tercel-lock").write_text("1")  # a process that was killed at once
    taken(tmp_path / "empty")
    assert [p.name for p in tmp_path.iterdir()] == ["empty"]


def test_a_marker_that_cannot_be_read_is_no_licence_to_begin_anew(tmp_path):
    folder = RunFolder(tmp_path)
    with folder.held():
        folder.begin("key", False)
    folder.marker.write_text("{")
    with pytest.raises(TercelError, match=r"run\.json, which says whose run this is, cannot be read"):
        taken(tmp_path)
