"""Where a run can be followed beside the terminal: TensorBoard, Trackio or Weights & Biases, each an extra."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tercel.errors import TercelError
from tercel.files import write_text
from tercel.train.run_folder import RunFolder

if TYPE_CHECKING:
    from tercel.draft.history import HeldOut, TrainingRecord
    from tercel.train.config import TrainConfig
    from tercel.train.loop import Watcher

PROJECT = "tercel"
_FOLLOWED = ("loss", "accuracy", "lr", "grad_norm")


class TrackerName(StrEnum):
    """Also the extra that brings it, and the package's name."""

    tensorboard = "tensorboard"
    trackio = "trackio"
    wandb = "wandb"


@dataclass(frozen=True)
class Run:
    """What a tracker is told of a run: its name and an id that it keeps when it goes on, the optimizer steps done
    (0: it begins), its settings, and where files may go."""

    name: str
    id: str
    step: int
    settings: Mapping[str, Any]
    folder: Path


class Tracker(Protocol):
    """Takes numbers of a step, by name."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


class _TensorBoard:
    def __init__(self, module: Any, run: Run) -> None:
        # what was written after the state that the run goes on from is made again
        purge = run.step + 1 if run.step else None
        self._writer = module.SummaryWriter(str(run.folder / "tensorboard" / run.id), purge_step=purge, flush_secs=30)
        self._writer.add_text("settings", "\n".join(f"    {name}: {value}" for name, value in run.settings.items()))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Trackio:
    def __init__(self, module: Any, run: Run) -> None:
        resume = "allow" if run.step else "never"
        name = f"{run.name}-{run.id}"
        self._run = module.init(project=PROJECT, name=name, config=dict(run.settings), resume=resume, embed=False)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class _WeightsAndBiases:
    def __init__(self, module: Any, run: Run) -> None:
        self._run = module.init(
            project=PROJECT, name=run.name, id=run.id, config=dict(run.settings), resume="allow", dir=str(run.folder)
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


_TRACKERS: dict[TrackerName, tuple[str, Callable[[Any, Run], Tracker]]] = {
    TrackerName.tensorboard: ("torch.utils.tensorboard", _TensorBoard),
    TrackerName.trackio: ("trackio", _Trackio),
    TrackerName.wandb: ("wandb", _WeightsAndBiases),
}


@dataclass(frozen=True)
class Found:
    """A tracker that is installed."""

    name: TrackerName
    begin: Callable[[Run], Tracker]


def find_tracker(name: TrackerName) -> Found:
    """Raises `TercelError` if its package is not installed."""
    module, kind = _TRACKERS[name]
    try:
        library = import_module(module)
    except ImportError as error:
        raise TercelError(f"--report-to {name} needs {name}: pip install 'tercel[{name}]'") from error
    return Found(name, partial(kind, library))


@contextmanager
def tracked(tracker: Found | None, watcher: Watcher, out: Path, config: TrainConfig) -> Iterator[Watcher]:
    """`watcher`, with what it is told also going to the tracker, if there is one, until the block ends.

    When the run begins, `TercelError` is raised if it cannot be followed there.
    """
    if tracker is None:
        yield watcher
        return
    both = _Tracked(tracker, watcher, out, config)
    try:
        yield both
    finally:
        both.close()


class _Tracked:
    """A `Watcher`. A tracker that fails on the way ends no run: that is said once, and it is left alone."""

    def __init__(self, found: Found, watcher: Watcher, out: Path, config: TrainConfig) -> None:
        self._found, self._watcher = found, watcher
        self._folder, self._config = RunFolder(out), config
        self._tracker: Tracker | None = None

    def started(self, step: int, steps: int, record: TrainingRecord) -> None:
        self._watcher.started(step, steps, record)
        told = {"steps": steps, "dtype": record.dtype, "tokens": record.tokens, "supervised": record.supervised_tokens}
        name = self._folder.out.resolve().name
        run = Run(name, self._id(step), step, {**self._config.values(), **told}, self._folder.training)
        try:
            self._tracker = self._found.begin(run)
        except Exception as error:  # of any kind: a library of somebody else, its files, its server
            raise TercelError(
                f"{self._found.name} could not begin ({_reason(error)}); see to it, or leave out --report-to"
            ) from error

    def warned(self, sentence: str) -> None:
        self._watcher.warned(sentence)

    def stepped(self, step: int, metrics: dict[str, float]) -> None:
        self._watcher.stepped(step, metrics)
        values = {f"train/{name}": metrics[name] for name in _FOLLOWED}
        self._log(step, {**values, "train/tokens_per_s": metrics["tokens"] / max(metrics["seconds"], 1e-9)})

    def evaluated(self, step: int, held_out: HeldOut) -> None:
        self._watcher.evaluated(step, held_out)
        alpha = {f"held_out/alpha_{depth}": value for depth, value in enumerate(held_out.alpha)}
        loss = {} if held_out.loss is None else {"held_out/loss": held_out.loss}
        self._log(step, {"held_out/tau": held_out.tau, **loss, **alpha})

    def close(self) -> None:
        self._guarded(lambda tracker: tracker.close())

    def _log(self, step: int, values: dict[str, float]) -> None:
        self._guarded(lambda tracker: tracker.log(step, values))

    def _guarded(self, act: Callable[[Tracker], None]) -> None:
        if self._tracker is None:
            return
        try:
            act(self._tracker)
        except Exception as error:
            self._tracker = None
            self._watcher.warned(f"{self._found.name} failed and is told no more ({_reason(error)}); the run goes on")

    def _id(self, step: int) -> str:
        """That of the run: made when it begins, kept beside its journal."""
        file = self._folder.tracked
        if step and file.is_file():
            return file.read_text("utf-8").strip()
        made = secrets.token_hex(4)
        write_text(file, f"{made}\n", held=True)
        return made


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
