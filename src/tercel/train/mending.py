"""The heads of a run put right when it goes on: damaged since, or written after the state that it goes on from."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

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
from tercel.reading import read_json

HeadFiles = dict[str, torch.Tensor]  # the bytes of a head's files by name, as a state keeps them


def head_files(folder: Path) -> HeadFiles:
    """What a state keeps of the head just written to `folder`."""
    return {name: torch.frombuffer(bytearray(data), dtype=torch.uint8) for name, data in read_set(folder).items()}


def restore_best(out: Path, best: HeadFiles) -> list[str]:
    """Make the head in `out` that of the state; returns what was damaged, as a sentence."""
    kept = {name: data.numpy().tobytes() for name, data in best.items()}
    wrong, manifest = damaged(out), read_manifest(out)
    same = manifest is not None and manifest.files.get(WEIGHTS) == hashlib.sha256(kept[WEIGHTS]).hexdigest()
    if wrong or not same:
        with file_set(out, "head") as staging:
            for name, data in kept.items():
                if name != CARD or may_replace_card(out):
                    (staging / name).write_bytes(data)
    return [_sentence("best", out, wrong)] if wrong else []


def doubts_about_last(last: Path, step: int) -> tuple[bool, list[str]]:
    """Whether the last head has to be written again at `step`, and what was damaged, as a sentence."""
    wrong = damaged(last)
    if wrong:  # without any file there, the run was stopped before its first
        return True, [] if wrong == [MANIFEST] and not any(last.glob("*.*")) else [_sentence("last", last, wrong)]
    return read_json(last / RECORD)["training"]["step"] != step, []


def _sentence(which: str, folder: Path, wrong: list[str]) -> str:
    return f"{', '.join(wrong)} of the {which} head in {folder} was missing or damaged and is written again"
