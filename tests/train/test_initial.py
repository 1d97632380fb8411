"""Where a head starts: the target's own output rows, and a fused hidden of unit size."""

from __future__ import annotations

import pytest
import torch

from tercel.target_model.model import Target
from tercel.target_model.sources import Source
from tercel.train.eagle3 import initialise_from_target
from tests.draft.heads_for_tests import some_vocabulary
from tests.tiny import tiny_model
from tests.train.worlds import LAYERS, head_for, random_chat, target_of

CHATS = [random_chat(20, seed) for seed in range(4)]


@pytest.mark.parametrize("arch", ["llama", "qwen2", "gemma3", "granite"])
def test_output_rows_give_the_targets_logits(arch):
    settings = {"logits_scaling": 4.0} if arch == "granite" else {}
    target = Target(tiny_model(arch, **settings), None, Source(arch, arch, "folder", None))
    vocabulary = some_vocabulary(50)
    head = head_for(target, vocabulary)
    initialise_from_target(head, target, vocabulary, CHATS)
    hidden = target.encode(torch.tensor(CHATS[0].tokens[None]).long()).hidden
    wanted = target.model(input_ids=torch.tensor(CHATS[0].tokens[None]).long()).logits[..., vocabulary.ids]
    torch.testing.assert_close(head.lm_head(hidden), wanted, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("flags", [{}, {"fc_norm": True}])
def test_the_fused_hidden_has_unit_size_and_no_layer_drowns_the_others(flags):
    target = target_of("llama")
    vocabulary = some_vocabulary(50)
    head = head_for(target, vocabulary, **flags)
    for norm in head.fc_norm:
        norm.weight.fill_(1.0)
    initialise_from_target(head, target, vocabulary, CHATS)
    features = target.encode(torch.tensor(CHATS[1].tokens[None]).long(), LAYERS).features[0]
    assert 0.5 < float(head.fuse(features).pow(2).mean().sqrt()) < 2
    if not flags:
        parts = [
            (part @ block.T).pow(2).mean().sqrt()
            for part, block in zip(features.chunk(3, -1), head.fc.weight.chunk(3, -1), strict=True)
        ]
        assert float(max(parts) / min(parts)) < 2.5
