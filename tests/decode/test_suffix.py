"""Suffix drafting: which continuations are drafted, out of which texts, and what is forgotten."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tercel.decode.engine import Engine
from tercel.decode.sampling import SamplingParams
from tercel.decode.suffix import KEY, Suffix, Texts
from tercel.decode.types import Proposal, Request
from tercel.draft.shape import TreeShape
from tercel.errors import TercelError
from tests.decode.drafts import tiny_target

TEXT = st.lists(st.integers(0, 2), min_size=1, max_size=24)


def drafted(proposer: Suffix, text: list[int], past: tuple[list[int], ...] = ()) -> Proposal:
    for answer in past:
        row = SimpleNamespace(tokens=[99])
        proposer.admit([row], [])
        row.tokens = [99, *answer]  # it was admitted with the first token of its answer
        proposer.select_rows(())
    row = SimpleNamespace(tokens=text)
    proposer.admit([row], [])
    return proposer.propose([row])[0]


def test_the_likeliest_continuations_come_first() -> None:
    text = [1, 2, 7, 8, 1, 2, 7, 9, 1, 2, 5, 5, 1, 2]
    proposal = drafted(Suffix(TreeShape(3, 2, 9), factor=3), text)
    assert (proposal.tree.token_list, proposal.tree.parent_list) == ([2, 7, 5, 9, 8, 5], [-1, 0, 0, 1, 1, 2])
    assert np.exp(proposal.log_q) == pytest.approx([1, 2 / 3, 1 / 3, 1 / 2, 1 / 2, 1])
    assert drafted(Suffix(TreeShape(3, 2, 9), factor=3, least=0.4), text).tree.token_list == [2, 7]
    assert drafted(Suffix(TreeShape(3, 2, 9), factor=1), text).tree.token_list == [2, 7, 5]  # two tokens in common
    assert drafted(Suffix(TreeShape.chain(3), factor=3), text).tree.token_list == [2, 7, 9, 1]  # of two alike the newer


def test_more_tokens_in_common_say_more() -> None:
    text = [0, 1, 2, 7, 7, 1, 2, 5, 5, 1, 2, 5, 6, 0, 1, 2]  # 1 2: most went on with 5; 0 1 2 with 7
    assert drafted(Suffix(TreeShape.chain(2)), text).tree.token_list == [2, 7, 7]


def test_past_answers_are_drafted_from_too_until_they_are_forgotten() -> None:
    answer = [4, 5, 6, 7, 8]
    assert drafted(Suffix(), [1, 4, 5]).tree.token_list == [5]
    assert drafted(Suffix(), [1, 4, 5], (answer,)).tree.token_list == [5, 6, 7]
    assert drafted(Suffix(past=12), [1, 4, 5], (answer, [1, 3])).tree.token_list == [5, 6, 7]
    assert drafted(Suffix(past=8), [1, 4, 5], (answer, [1, 3])).tree.token_list == [5]
    assert drafted(Suffix(past=0), [1, 4, 5], (answer,)).tree.token_list == [5]
    assert drafted(Suffix(past=4), [1, 6, 7], (answer,)).tree.token_list == [7, 8]  # the end of what is too long


@pytest.mark.parametrize("numbers", [{"factor": 0}, {"least": 2}, {"past": -1}, {"factor": float("nan")}])
def test_numbers_that_mean_nothing(numbers: dict[str, float]) -> None:
    with pytest.raises(TercelError, match="suffix drafting needs"):
        Suffix(**numbers)


@settings(max_examples=60, deadline=None)
@given(st.lists(TEXT, min_size=1, max_size=5), TEXT, st.integers(0, 60))
def test_counts_are_those_of_a_search_through_the_texts(texts: list[list[int]], end: list[int], most: int) -> None:
    store = Texts(most)
    for text in texts:
        store.add(text)
    assert len(store) <= most
    kept: list[list[int]] = []  # the newest that fit
    for text in reversed([text[max(0, len(text) + 1 - most) :] for text in texts]):
        if most == 0 or sum(len(k) + 1 for k in kept) + len(text) + 1 > most:
            break
        kept.append(text)
    assert sum(len(ends) for ends in store._ends.values()) == sum(
        max(0, len(text) + 1 - n) for text in kept for n in range(1, KEY + 1)
    )
    sets = dict(store.matches(end))
    for length in range(1, len(end) + 1):
        after = Counter(
            text[place]
            for text in kept
            for place in range(length, len(text))
            if text[place - length : place] == end[len(end) - length :]
        )
        if after:
            places = sets[min(known for known in sets if known >= length)]
            assert {token: len(ends) for token, ends, _ in store.next(places)} == after
        else:
            assert all(known < length for known in sets)


def test_a_second_answer_to_a_prompt_is_drafted_from_the_first() -> None:
    target = tiny_target("llama", num_hidden_layers=2)
    params = SamplingParams(max_new_tokens=30, ignore_eos=True, temperature=1.0, seed=2)
    engine = Engine(target, Suffix(TreeShape(2, 24, 32)))
    first, again = (engine.generate([Request((5, 6, 7, 8), params)])[0] for _ in range(2))
    other = engine.generate([Request((5, 6, 7, 8), replace(params, seed=3))])[0]
    assert first.tokens == again.tokens
    assert again.tau > 2 * first.tau
    assert other.tokens != first.tokens
