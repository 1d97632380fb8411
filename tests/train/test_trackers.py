"""What a run tells a tracker: TensorBoard itself, and stand-ins of the others with the calls of their own APIs."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from tercel.errors import TercelError
from tercel.train.run_folder import RunFolder
from tercel.train.trackers import Found, TrackerName, find_tracker, tracked
from tests.train.test_loop import SMALL, Recorder, outcome_rows, run

CONFIG = replace(SMALL, epochs=1, accumulate=1)


class Noting(Recorder):
    """Notes warnings too."""

    def __init__(self) -> None:
        super().__init__()
        self.warnings: list[str] = []

    def warned(self, sentence: str) -> None:
        self.warnings.append(sentence)


class StandIn:
    """A module with `init`, whose runs have `log` and `finish`: what is used of trackio 0.43 and wandb 0.31."""

    def __init__(self, failing: int = 0) -> None:
        self.begun: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.ended, self.failing = 0, failing

    def init(self, **asked: Any) -> StandIn:
        self.begun.append(asked)
        return self

    def log(self, values: dict[str, float], step: int | None = None) -> None:
        assert step is not None
        if self.failing and step >= self.failing:
            raise ConnectionError("no route\nto host")
        self.logged.append((step, values))

    def finish(self) -> None:
        self.ended += 1


def follow(name: TrackerName, out: Path, watcher: Recorder | None = None, **more: Any) -> None:
    with tracked(find_tracker(name), watcher or Recorder(), out, CONFIG) as both:
        run(out, CONFIG, watcher=both, **more)


def expected(out: Path) -> list[tuple[int, str, float]]:
    """Loss and τ by step, as the journal has them."""
    rows = outcome_rows(out)
    losses = [(row["step"], "train/loss", row["loss"]) for row in rows if "loss" in row]
    return sorted(losses + [(row["step"], "held_out/tau", row["eval"]["tau"]) for row in rows if "eval" in row])


@pytest.mark.parametrize("name", [TrackerName.trackio, TrackerName.wandb])
def test_a_run_that_goes_on_is_one_run_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: TrackerName
) -> None:
    there = StandIn()
    monkeypatch.setitem(sys.modules, name, there)  # type: ignore[arg-type]
    follow(name, tmp_path / "head", stop_after=3)
    follow(name, tmp_path / "head")
    told = [(step, key, value) for step, values in there.logged for key, value in values.items()]
    assert sorted(t for t in told if t[1] in ("train/loss", "held_out/tau")) == expected(tmp_path / "head")
    assert {key for _, key, _ in told} >= {"train/lr", "train/tokens_per_s", "held_out/alpha_1", "held_out/loss"}
    first, second = there.begun
    assert first["project"] == second["project"] == "tercel"
    same = "id" if name == TrackerName.wandb else "name"
    assert first[same] == second[same]
    assert second["resume"] == "allow"
    assert first["config"]["ttt_steps"] == 2
    assert there.ended == 2
    follow(name, tmp_path / "head", overwrite=True, stop_after=1)
    assert there.begun[2][same] != first[same]


class Writer:
    """A stand-in of TensorBoard's, with what is called of it."""

    made: ClassVar[list[Writer]] = []

    def __init__(self, log_dir: str, purge_step: int | None, flush_secs: int) -> None:
        self.log_dir, self.purge_step = log_dir, purge_step
        self.scalars: list[tuple[int, str, float]] = []
        self.closed = False
        self.made.append(self)

    def add_text(self, tag: str, text: str) -> None:
        assert "ttt_steps: 2" in text

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.scalars.append((step, tag, value))

    def close(self) -> None:
        self.closed = True


def test_what_was_told_after_the_state_that_a_run_goes_on_from_is_purged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))
    monkeypatch.setattr(Writer, "made", [])
    out = tmp_path / "head"
    follow(TrackerName.tensorboard, out, stop_after=3)
    follow(TrackerName.tensorboard, out)
    first, second = Writer.made
    assert (first.purge_step, second.purge_step) == (None, 4)
    assert first.log_dir == second.log_dir
    assert first.closed
    assert second.closed
    told = [scalar for writer in Writer.made for scalar in writer.scalars]
    assert sorted(scalar for scalar in told if scalar[1] in ("train/loss", "held_out/tau")) == expected(out)


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    out = tmp_path / "head"
    follow(TrackerName.tensorboard, out, stop_after=3)
    follow(TrackerName.tensorboard, out)
    (folder,) = (RunFolder(out).training / "tensorboard").iterdir()
    events = reading.EventAccumulator(str(folder)).Reload()
    found = [(e.step, tag, e.value) for tag in ("train/loss", "held_out/tau") for e in events.Scalars(tag)]
    assert [(step, tag) for step, tag, _ in sorted(found)] == [(step, tag) for step, tag, _ in expected(out)]
    assert [v for *_, v in sorted(found)] == pytest.approx([v for *_, v in expected(out)], rel=1e-6)


def test_a_tracker_that_fails_on_the_way_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there, watcher = StandIn(failing=2), Noting()
    monkeypatch.setitem(sys.modules, "wandb", there)  # type: ignore[arg-type]
    follow(TrackerName.wandb, tmp_path / "head", watcher)
    assert watcher.warnings == ["wandb failed and is told no more (ConnectionError: no route to host); the run goes on"]
    assert watcher.steps[-1] > 2
    assert [step for step, _ in there.logged] == [1]


def test_a_tracker_that_is_missing_or_cannot_begin_is_told_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(TercelError, match=r"--report-to wandb needs wandb: pip install 'tercel\[wandb\]'"):
        find_tracker(TrackerName.wandb)

    def begin(_: Any) -> Any:
        raise RuntimeError("not logged in")

    watcher = Recorder()
    with (
        pytest.raises(TercelError, match=r"wandb could not begin \(RuntimeError: not logged in\).*leave out"),
        tracked(Found(TrackerName.wandb, begin), watcher, tmp_path / "head", CONFIG) as both,
    ):
        run(tmp_path / "head", CONFIG, watcher=both)
    assert watcher.steps == []


def test_every_tracker_is_an_extra() -> None:
    import tomllib

    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))["project"]
    for name in TrackerName:
        assert any(needed.startswith(name) for needed in extras["optional-dependencies"][name])
