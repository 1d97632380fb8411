"""What is learned from, in which order, and the words for data that cannot be used."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercel.errors import TercelError
from tercel.train.batches import data_digest, plan_batches, split, supervised_counts, usable
from tests.train.worlds import chat, random_chat


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=20),
    size=st.integers(1, 50),
    epochs=st.integers(1, 3),
    seed=st.integers(0, 5),
)
def test_every_chat_once_an_epoch_in_batches_of_the_size(lengths, size, epochs, seed):
    plan = plan_batches(lengths, size, epochs, seed)
    assert plan == plan_batches(lengths, size, epochs, seed)
    assert sorted(i for batch in plan for i in batch) == sorted(list(range(len(lengths))) * epochs)
    for batch in plan:
        assert batch
        assert len(batch) == 1 or sum(lengths[i] for i in batch) <= size


def test_epochs_and_seeds_have_other_orders():
    lengths = [1] * 30
    two = plan_batches(lengths, 100, 2, 0)
    assert two[0] != two[1]
    assert plan_batches(lengths, 100, 1, 1)[0] != two[0]
    assert plan_batches(lengths, 100, 1, 0) == two[:1]


def test_equal_chats_fall_on_one_side():
    chats = [random_chat(9, seed) for seed in range(40)]
    parts = split([*chats, *chats], 0.3)
    train = {one.tokens.tobytes() for one in parts.train}
    held = {one.tokens.tobytes() for one in parts.held_out}
    assert not train & held
    assert len(parts.train) + len(parts.held_out) == 80
    assert 8 <= len(parts.held_out) <= 44


def test_too_few_conversations():
    with pytest.raises(TercelError, match=r"2 conversations are too few to hold out a share of 0.01; give more data"):
        split([random_chat(9, 1), random_chat(9, 2)], 0.01)


def test_ids_outside_the_vocabulary_are_refused_wherever_they_stand():
    for token, at in ((128, 0), (500, 3), (-1, 2)):
        tokens = [5, 6, 7, 8]
        tokens[at] = token
        one = chat(tokens, [False, False, True, True], "third")
        with pytest.raises(TercelError, match=f"conversation third holds token {token}, but the target has 128 tokens"):
            usable([random_chat(9, 1), one], 100, 128)


def test_chats_without_a_row_are_left_out_after_the_cut():
    late = chat(list(range(10, 20)), [False] * 8 + [True] * 2)
    early = chat([5, 6, 7], [True, True, False])  # nothing stands two before what they say
    good = random_chat(12, 1)
    assert [len(c) for c in usable([late, early, good, chat([], [])], 6, 128)] == [6]
    assert [len(c) for c in usable([late, good], 9, 128)] == [9, 9]
    with pytest.raises(TercelError, match="none of 2 conversations has a token of the assistant within 8 tokens"):
        usable([late, early], 8, 128)


def test_more_epochs_than_can_be_planned():
    with pytest.raises(TercelError, match="67,108,864 epochs of 2 conversations are more than the 67,108,864 that"):
        plan_batches([5, 5], 10, 1 << 26, 0)


def test_only_supervised_tokens_are_counted():
    counts = supervised_counts([chat([1, 2, 2, 3], [False, True, True, True]), chat([3, 9], [True, False])], 10)
    assert counts.tolist() == [0, 0, 2, 2, 0, 0, 0, 0, 0, 0]


def test_the_digest_sees_tokens_masks_and_order():
    a, b = random_chat(9, 1), random_chat(9, 2)
    other = chat(a.tokens.tolist(), (~a.supervised).tolist())
    digests = {data_digest(x) for x in ([a, b], [b, a], [a], [other, b])}
    assert len(digests) == 4
    assert data_digest([a, b]) == data_digest([chat(np.array(a.tokens), np.array(a.supervised)), b])
