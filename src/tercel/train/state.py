"""What a run needs to go on exactly where it was: written whole or not at all."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tercel.errors import TercelError
from tercel.file_set import damaged, file_set, read_manifest
from tercel.train.run_folder import STATE, other_run

KIND = "training state"


@dataclass(frozen=True)
class TrainState:
    """step: optimizer steps done. seconds: spent in training. best: best held-out τ so far; best_head: the files of the
    head that reached it, as bytes by name, so that it can be written again. mean: the running mean of the weights, of a
    run that keeps one.

    Data order, learning rate and dropout are functions of the step, so this and the random
    state are all that a bit-for-bit continuation takes.
    """

    key: str
    step: int
    seconds: float
    best: float
    head: dict[str, torch.Tensor]
    optimizer: dict[str, Any]
    rng: torch.Tensor
    best_head: dict[str, torch.Tensor]
    mean: dict[str, torch.Tensor] | None = None


def save_state(state: TrainState, folder: Path) -> None:
    with file_set(folder, KIND) as staging:
        try:
            torch.save({name: value for name, value in vars(state).items() if value is not None}, staging / STATE)
        except RuntimeError as error:  # how torch reports a full disk
            raise TercelError(f"saving the training state to {folder} failed ({error}); is the disk full?") from error


def load_state(folder: Path, key: str) -> TrainState | None:
    """The state saved in `folder`, or None if none was saved yet.

    Raises `TercelError` if it is missing or damaged, or belongs to a run with other settings, data or target (`key`).
    """
    path, run = folder / STATE, folder.parent
    if read_manifest(folder) is None and not path.exists():
        return None
    if damaged(folder):
        raise TercelError(
            f"{path} is missing or damaged, so the run cannot resume; bring it back from a copy, or start over with "
            "--overwrite (the heads written so far can be used as they are; copy them first)"
        )
    try:
        state = TrainState(**torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:  # torch raises many kinds, with advice that is wrong here
        raise TercelError(
            f"{path} cannot be read ({type(error).__name__}), by this version at least; start over with --overwrite"
        ) from error
    if state.key != key:
        raise TercelError(other_run(run))
    return state
