"""τ and n-α by the definitions, each written out once more the long way."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercel.draft.acceptance import NAlpha, acceptance_length, count_chains, joint, tokens_of_steps

DEPTH = 4
CHAINS = st.lists(st.tuples(st.integers(0, DEPTH), st.integers(0, DEPTH)).map(lambda pair: (min(pair), max(pair))))


def test_by_hand():
    # three chains of three: all right; wrong at once; right twice, where the answer ended
    counted = count_chains([3, 0, 2], [3, 3, 2], 3)
    assert counted == NAlpha(right=(2, 2, 1), seen=(3, 2, 1))
    assert counted.alpha == (2 / 3, 1.0, 1.0)
    assert count_chains([], [], 2) == NAlpha((0, 0), (0, 0))
    assert count_chains([], [], 2).alpha == (None, None)


@given(CHAINS)
def test_every_draft_is_looked_at_as_long_as_all_before_it_were_right(chains):
    right, seen = [0] * DEPTH, [0] * DEPTH
    for accepted, room in chains:
        for place in range(room):
            seen[place] += 1
            if place == accepted:
                break
            right[place] += 1
    counted = count_chains([a for a, _ in chains], [room for _, room in chains], DEPTH)
    assert (list(counted.right), list(counted.seen)) == (right, seen)
    assert all(count == sum(a > place for a, _ in chains) for place, count in enumerate(counted.right))


@given(st.lists(st.integers(0, DEPTH), min_size=1))
def test_where_no_answer_ends_early_the_two_numbers_tell_each_other(accepted):
    """τ is 1 and the chances of the first draft, of the first two, …"""
    alpha = count_chains(accepted, [DEPTH] * len(accepted), DEPTH).alpha
    known = [value for value in alpha if value is not None]
    chances = joint(known)
    assert chances == pytest.approx([prod(known[: n + 1]) for n in range(len(known))])
    tokens = sum(taken + 1 for taken in accepted)
    assert acceptance_length(tokens, len(accepted)) == pytest.approx(1 + sum(chances))


def test_prefill_counts_neither_as_a_token_nor_as_a_step():
    assert tokens_of_steps((7, 8, 9)) == tokens_of_steps(3) == 2
    assert acceptance_length(tokens_of_steps((7,)), 0) == 1.0
    assert acceptance_length(tokens_of_steps(9), 4) == 2.0
