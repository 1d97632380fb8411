"""Who sees whom, against a definition that goes token by token."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tercel.target_model.masks import additive, causal_block, slot_positions, visible_slots, within_window

LENGTHS = st.lists(st.integers(0, 6), min_size=1, max_size=4)


@settings(max_examples=40, deadline=None)
@given(lengths=LENGTHS, block=st.integers(1, 4), extra=st.integers(0, 3), seed=st.integers(0, 99))
def test_a_token_sees_its_rows_past_and_what_it_is_allowed_behind_it(lengths, block, extra, seed):
    generator = torch.Generator().manual_seed(seed)
    block_mask = torch.rand(len(lengths), block, block + extra, generator=generator) < 0.5
    seen = visible_slots(lengths, block_mask)
    assert seen.shape == (len(lengths), block, max(lengths) + block + extra)
    for row, length in enumerate(lengths):
        for token in range(block):
            for slot in range(seen.shape[2]):
                place = slot - length
                expected = place < 0 or (place < block + extra and bool(block_mask[row, token, place]))
                assert bool(seen[row, token, slot]) == expected


@settings(max_examples=40, deadline=None)
@given(lengths=LENGTHS, block=st.integers(1, 4), window=st.integers(1, 8))
def test_windows_count_positions_not_slots(lengths, block, window):
    depths = torch.arange(block) // 2  # siblings share a position
    positions = torch.tensor(lengths)[:, None] + depths
    slots = slot_positions(lengths, positions)
    allowed = within_window(positions, slots, window)
    for row, length in enumerate(lengths):
        place = [
            *range(length),
            *(length + int(d) for d in depths),
        ]  # position of the token in each filled slot
        for token in range(block):
            for slot, position in enumerate(place):
                expected = int(positions[row, token]) - position < window
                assert bool(allowed[row, token, slot]) == expected


def test_causal_block_and_additive_form():
    mask = causal_block(3, torch.device("cpu"))
    assert mask.int().tolist() == [[[1, 0, 0], [1, 1, 0], [1, 1, 1]]]
    low = torch.finfo(torch.bfloat16).min
    added = additive(mask, torch.bfloat16)
    assert added.shape == (1, 1, 3, 3)
    assert added[0, 0, 0].tolist() == [0, low, low]
