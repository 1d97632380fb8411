"""The best and the last head of a run, and how they are put right when it goes on."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch

from tercel.draft import DraftModel, TrainingRecord, save_head
from tercel.draft.history import HeldOut
from tercel.file_set import (
    CARD,
    MANIFEST,
    RECORD,
    WEIGHTS,
    damaged,
    file_set,
    may_replace_card,
    read_manifest,
    read_set,
)
from tercel.interop.card import head_card
from tercel.reading import read_json
from tercel.stopping import uninterrupted
from tercel.train.run_folder import RunFolder


class RunHeads:
    """best: highest held-out τ so far; best_files: the files of the head that reached it, as bytes by name, which a
    state keeps so that they can be written again; notes: what was damaged, in sentences.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.best = -1.0
        self.best_files: dict[str, torch.Tensor] = {}
        self.notes: list[str] = []

    def offer(self, model: DraftModel, tau: float) -> None:
        """Write `model` as the best head if its held-out τ is the highest so far."""
        if tau > self.best:
            _write(model, self.folder.out)
            files = read_set(self.folder.out)
            self.best_files = {n: torch.frombuffer(bytearray(data), dtype=torch.uint8) for n, data in files.items()}
            self.best = tau

    def best_held_out(self) -> HeldOut | None:
        """What the best head reached, as its own record says, which a state keeps; None before the first one."""
        if RECORD not in self.best_files:
            return None
        record = json.loads(self.best_files[RECORD].numpy().tobytes())
        return HeldOut.from_json(record["measured"]["held_out"], "held_out", self.folder.out / RECORD)

    def write_last(self, model: DraftModel) -> None:
        _write(model, self.folder.last)

    def restore(self, best: float, best_files: dict[str, torch.Tensor], last: DraftModel, step: int) -> None:
        """Go on from a state of optimizer step `step`, whose head is `last`: heads damaged since, or written after the
        state was saved, are replaced.
        """
        self.best, self.best_files = best, best_files
        if best_files:
            self._restore_best()
        if step > 0:
            self._restore_last(last, step)

    def _restore_best(self) -> None:
        out = self.folder.out
        kept = {name: data.numpy().tobytes() for name, data in self.best_files.items()}
        wrong, manifest = damaged(out), read_manifest(out)
        if wrong:
            self._note("best", out, wrong)
        if wrong or manifest is None or manifest.files.get(WEIGHTS) != hashlib.sha256(kept[WEIGHTS]).hexdigest():
            with file_set(out, "head") as staging:
                for name, data in kept.items():
                    if name != CARD or may_replace_card(out):
                        (staging / name).write_bytes(data)

    def _restore_last(self, model: DraftModel, step: int) -> None:
        last = self.folder.last
        wrong = damaged(last)
        if wrong and not (wrong == [MANIFEST] and not (last / WEIGHTS).exists()):  # killed before it wrote its first
            self._note("last", last, wrong)
        if wrong or _step(last) != step:
            self.write_last(model)

    def _note(self, which: str, folder: Path, wrong: list[str]) -> None:
        names = ", ".join(wrong)
        self.notes.append(f"{names} of the {which} head in {folder} was missing or damaged and is written again")


def _step(folder: Path) -> int | None:
    """The optimizer step that the head in `folder` is of."""
    file = folder / RECORD
    return TrainingRecord.from_json(read_json(file).get("training"), "training", file).step


def _write(model: DraftModel, folder: Path) -> None:
    with uninterrupted():
        save_head(model, folder, card=head_card(model))
