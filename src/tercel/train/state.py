"""What a run needs to go on exactly where it was: written whole or not at all."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tercel.errors import TercelError
from tercel.files import atomic_file


@dataclass(frozen=True)
class TrainState:
    """step: optimizer steps done. seconds: spent in training. best: best held-out τ so far.

    Data order and learning rate are functions of the step, dropout there is none, so this and the random
    state are all that a bit-for-bit continuation takes.
    """

    key: str
    step: int
    seconds: float
    best: float
    head: dict[str, torch.Tensor]
    optimizer: dict[str, Any]
    rng: torch.Tensor


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold Ctrl-C back until the block ends: neither half an update nor half a swap of folders may stay."""
    if threading.current_thread() is not threading.main_thread():  # only there do signals arrive
        yield
        return
    held: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, _frame: held.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if held:
        raise KeyboardInterrupt


def save_state(state: TrainState, path: Path) -> None:
    with atomic_file(path) as partial:
        try:
            torch.save(vars(state), partial)
        except RuntimeError as error:  # how torch reports a full disk
            raise TercelError(f"saving the training state to {path} failed ({error}); is the disk full?") from error


def load_state(path: Path, key: str) -> TrainState | None:
    """The saved state, or None where there is none.

    Raises `TercelError` if it is damaged or belongs to a run with other settings, data or target (`key`).
    """
    if not path.is_file():
        return None
    try:
        state = TrainState(**torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:  # torch raises many kinds for a damaged file, with advice that is wrong here
        raise TercelError(
            f"{path} is damaged or no training state ({type(error).__name__}); delete it to start over"
        ) from error
    if state.key != key:
        raise TercelError(
            f"{path.parent.parent} holds a run with other settings, data or target; "
            "choose another --out, or --overwrite"
        )
    return state
