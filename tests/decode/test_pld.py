"""Prompt lookup: which continuation is drafted."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tercel.decode.engine import Engine
from tercel.decode.pld import PromptLookup
from tercel.decode.proposers import make_proposer
from tercel.decode.sampling import SamplingParams
from tercel.decode.types import Request
from tercel.draft.shape import TreeShape
from tercel.errors import TercelError
from tests.decode.drafts import tiny_target


def drafted(proposer: PromptLookup, *texts: list[int]):
    """The last tree, of a row whose text grew like this."""
    row = SimpleNamespace(tokens=[])
    proposer.reset(0)
    proposer.admit([row], [])
    for text in texts:
        row.tokens = text
        tree = proposer.propose([row])[0].tree
    return tree


def test_the_longest_ngram_wins_and_then_the_newest_place() -> None:
    text = [1, 2, 3, 40, 9, 2, 3, 50, 8, 2, 3, 60, 7, 1, 2, 3]
    assert drafted(PromptLookup(TreeShape.chain(2)), text).token_list == [3, 40, 9]
    assert drafted(PromptLookup(TreeShape.chain(2), max_ngram=2), text).token_list == [3, 60, 7]


def test_a_tree_has_several_different_continuations() -> None:
    text = [1, 2, 3, 40, 9, 2, 3, 50, 8, 2, 3, 60, 7, 2, 3, 60, 7, 1, 2, 3]
    tree = drafted(PromptLookup(TreeShape(3, 2, 7)), text)
    assert (tree.token_list, tree.parent_list) == ([3, 40, 9, 60, 7, 50, 8], [-1, 0, 1, 0, 3, 0, 5])
    assert drafted(PromptLookup(TreeShape(3, 2, 4)), text).token_list == [3, 40, 9, 60]  # no more than it may have


def test_a_text_that_repeats_itself_goes_on_so() -> None:
    assert drafted(PromptLookup(TreeShape.chain(5)), [7, 5, 5]).token_list == [5] * 6
    assert drafted(PromptLookup(TreeShape.chain(5)), [1, 2, 1, 2]).token_list == [2, 1, 2, 1, 2, 1]


def test_a_new_token_drafts_nothing() -> None:
    assert drafted(PromptLookup(), [1, 2, 3]).token_list == [3]
    with pytest.raises(TercelError, match="at least one token"):
        PromptLookup(max_ngram=0)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=30), st.integers(1, 4), st.data())
def test_as_a_search_from_the_end_finds_it(text: list[int], longest: int, data: st.DataObject) -> None:
    cut = data.draw(st.integers(1, len(text)))
    tree = drafted(PromptLookup(TreeShape.chain(3), longest), text[:cut], text)  # read in two pieces
    wanted: list[int] = []
    for n in range(longest, 0, -1):
        places = [end for end in range(n, len(text)) if text[end - n : end] == text[len(text) - n :]]
        if places:
            grown = list(text)
            while len(wanted) < 3:
                wanted.append(grown[places[-1] + len(wanted)])
                grown.append(wanted[-1])
            break
    assert tree.token_list == [text[-1], *wanted]


def test_it_drafts_as_published_if_nothing_is_said() -> None:
    proposer = PromptLookup()
    assert (proposer.shape, proposer.max_nodes, proposer.needs_tree) == (TreeShape.chain(10), 11, False)
    target = tiny_target("llama", num_hidden_layers=2)
    params = SamplingParams(max_new_tokens=40, logit_bias={9: 60.0, 10: 59.5})
    result = Engine(target, make_proposer("pld", target, shape=TreeShape.chain(10))).generate(
        [Request((9, 10, 9, 9, 10, 9), params)]
    )[0]
    assert result.tau > 3
