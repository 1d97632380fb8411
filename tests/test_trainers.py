"""Trainers beside this one: what they are given (`bench/`)."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import training
from given import Given, Packed
from safetensors.torch import save_file

JOB = {
    **training.SIZES,
    "trainer": "tercel",
    "dtype": "float32",
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "vocab_size": 32,
    "draft_vocab_size": 8,
    "length": 12,
    "steps": 3,
    "threads": 1,
    "recipe": training.RECIPE,
}


def test_a_batch_is_read_as_it_was_written_and_cut_into_its_sequences(tmp_path: Path) -> None:
    tokens = torch.arange(5)
    save_file(
        {
            "tokens": tokens,
            "lengths": torch.tensor([2, 3]),
            "supervised": tokens > 1,
            "taught": tokens > 0,
            "features": torch.randn(5, 6),
            "last": torch.randn(5, 2),
        },
        tmp_path / "batch",
    )
    first, second = Packed.read(tmp_path / "batch").sequences()
    assert (first.lengths, second.lengths) == ([2], [3])
    assert second.tokens.tolist() == [2, 3, 4]
    assert first.supervised.tolist() == [False, False]
    assert second.features.shape == (3, 6)


def test_the_vocabulary_given_to_peers_says_the_same_in_both_of_its_forms() -> None:
    given = Given.of(JOB)
    assert torch.nonzero(given.t2d)[:, 0].tolist() == given.ids.tolist()
    assert (given.d2t + torch.arange(len(given.ids))).tolist() == given.ids.tolist()


def test_the_measured_step_is_one_that_learns(tmp_path: Path) -> None:
    trainer = training.Trainer("tercel", JOB, tmp_path / "log", tmp_path)
    try:
        for _ in range(4):
            assert trainer.step() > 0
    finally:
        trainer.close()
    assert trainer.losses == sorted(trainer.losses, reverse=True)
    assert trainer.losses[-1] < trainer.losses[0]


def test_a_peer_that_is_not_installed_is_null_and_why_says_how_to_install_it(tmp_path: Path) -> None:
    args = argparse.Namespace(trainers=["specforge"], venvs=tmp_path, work=tmp_path, steps=2, threads=1, rounds=1)
    found = training.setting("float32", 12, args)
    assert "make trainers-venv" in found["specforge"]["why"]
    assert training.rates(found, 12) == {"specforge": None}
