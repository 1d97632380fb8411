"""What becomes of embeddings that a head to go on with has of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tercel.draft import DraftModel, HeadInfo, TrainingRecord, load_head, save_head
from tercel.train.batches import split
from tercel.train.config import TrainConfig
from tercel.train.loop import train
from tercel.train.run_folder import RunFolder
from tests.draft.heads_for_tests import some_vocabulary
from tests.train.worlds import head_for, random_chat, target_of

CHATS = [random_chat(12 + seed % 5, seed) for seed in range(14)]
CONFIG = TrainConfig(epochs=1, batch_tokens=40, accumulate=2, lr=2e-3, ttt_steps=2, eval_share=0.2)


def saved(folder: Path, embeddings: str | None = None, **flags) -> DraftModel:
    """A head with embeddings of its own, as another maker may leave one."""
    vocabulary = some_vocabulary(64)
    head = head_for(target_of("llama"), vocabulary, own_embeddings=True, **flags)
    info = HeadInfo(None, TrainingRecord(embeddings=embeddings))
    save_head(DraftModel(head, vocabulary, info), folder, dtype=torch.float32)
    return load_head(folder)


def run(start: Path, out: Path, stop_after: int | None = None) -> DraftModel:
    """The last head of a run that begins with the one in `start`."""
    train(target_of("llama"), CHATS, replace(CONFIG, start_from=str(start)), out, stop_after=stop_after)
    return load_head(RunFolder(out).last)


@pytest.mark.parametrize("flags", [{}, {"hidden_size": 24}], ids=["target's width", "another width"])
def test_they_go_on_learning(tmp_path, flags):
    start = saved(tmp_path / "start", **flags)
    after = run(tmp_path / "start", tmp_path / "whole")
    assert after.info.training.embeddings == "trained"
    assert "Embeddings of its own (trained)" in (RunFolder(tmp_path / "whole").last / "README.md").read_text()
    seen = torch.tensor(np.concatenate([c.tokens for c in split(CHATS, CONFIG.eval_share).train])).long()
    # further than the file's rounding; the first and last token of a chat are never read
    moved = (after.head.embed_tokens.weight - start.head.embed_tokens.weight).abs().amax(-1) > 2e-3
    assert moved[seen].float().mean() > 0.5
    assert not moved.index_fill(0, seen, False).any()
    run(tmp_path / "start", tmp_path / "stopped", stop_after=1)
    resumed = run(tmp_path / "start", tmp_path / "stopped")
    for name, weights in after.head.named_parameters():
        assert torch.equal(resumed.head.get_parameter(name), weights), name


def test_those_that_never_learned_stay_as_they_are(tmp_path):
    start = saved(tmp_path / "start", "frozen")
    after = run(tmp_path / "start", tmp_path / "r")
    assert after.info.training.embeddings == "frozen"
    assert torch.equal(after.head.embed_tokens.weight, start.head.embed_tokens.weight.bfloat16().float())
    assert not torch.equal(after.head.fc.weight, start.head.fc.weight.bfloat16().float())


def test_those_that_repeat_the_targets_are_left_to_it(tmp_path):
    start, target = saved(tmp_path / "start"), target_of("llama")
    with torch.no_grad():
        start.head.embed_tokens.weight.copy_(target.embed(torch.arange(target.vocab_size)))
    save_head(start, tmp_path / "start", dtype=torch.float32)
    after = run(tmp_path / "start", tmp_path / "r")
    assert after.info.training.embeddings is None
    assert not after.head.config.own_embeddings
