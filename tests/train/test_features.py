"""Batches of what the target says of chats, and the blocks in which it is asked."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tercel.train.encoding import PADDING_WASTE, padding_groups
from tercel.train.features import FeatureSupply
from tests.draft.heads_for_tests import some_vocabulary
from tests.train.worlds import LAYERS, head_for, random_chat, target_of

CHATS = [random_chat(n, n) for n in (9, 14, 5)]


def supply_of(arch: str) -> FeatureSupply:
    target, vocabulary = target_of(arch), some_vocabulary(60)
    return FeatureSupply(target, head_for(target, vocabulary), vocabulary)


@pytest.mark.parametrize("arch", ["llama", "gemma3", "granite"])
def test_a_batch_holds_what_the_target_says_of_each_chat_alone(arch):
    supply = supply_of(arch)
    batch = supply.batch(CHATS)
    start = 0
    for one in CHATS:
        tokens = torch.tensor(one.tokens[None]).long()
        own = supply.target.model(input_ids=tokens, output_hidden_states=True)
        part = slice(start, start + len(one))
        wanted = torch.cat([own.hidden_states[i][0] for i in LAYERS], -1)
        torch.testing.assert_close(batch.features[part], wanted, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(batch.embeddings[part], own.hidden_states[0][0])
        p = torch.softmax(own.logits[0][:, supply.vocabulary.ids], -1)
        for t in range(len(one)):
            row = int(batch.taught[start + t])
            predicts = t + 1 < len(one) and bool(one.supervised[t + 1])
            assert (row >= 0) == predicts
            if predicts:
                torch.testing.assert_close(batch.teacher.probs[row], p[t], rtol=1e-3, atol=1e-5)
        start += len(one)
    assert batch.positions.tolist() == [t for one in CHATS for t in range(len(one))]


@given(lengths=st.lists(st.integers(1, 60), max_size=12), most=st.integers(1, 200) | st.none())
def test_groups_waste_little_padding(lengths, most):
    groups = padding_groups(lengths, most)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    for group in groups:
        padded = max(lengths[i] for i in group) * len(group)
        assert padded <= PADDING_WASTE * sum(lengths[i] for i in group)
        assert len(group) == 1 or most is None or padded <= most
