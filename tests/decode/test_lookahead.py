"""Lookahead: what its window sees, what becomes of it, and that it is refused where it cannot be computed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tercel.decode.engine import Engine
from tercel.decode.lookahead import Lookahead
from tercel.decode.proposers import make_proposer
from tercel.decode.sampling import SamplingParams
from tercel.decode.types import Request
from tercel.draft.shape import TreeShape
from tercel.errors import TercelError
from tercel.target_model.capabilities import TreeSupport
from tercel.target_model.model import Target
from tests.decode.drafts import Watched, tiny_target

PROMPTS = ((5, 6, 7, 8, 9), (30, 31, 32))


class Traced(Watched):
    """With what was committed behind each proposal."""

    def __init__(self, inner: Lookahead) -> None:
        super().__init__(inner)
        self.committed = []

    def commit(self, committed):
        super().commit(committed)
        self.committed += committed


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target("llama", num_hidden_layers=2)


def test_every_token_sees_one_for_each_position_before_it(target: Target) -> None:
    traced = Traced(Lookahead(target, window=4, ngram=4, guesses=2))
    Engine(target, traced).generate([Request(PROMPTS[0], SamplingParams(max_new_tokens=12, ignore_eos=True, seed=0))])
    asides = [proposal.aside for _, proposal in traced.seen]
    assert [len(aside) for aside in asides[:4]] == [3, 7, 11, 11]  # a level a step, up to three; without the last token
    for aside in asides:
        depths = np.array(aside.depths)
        assert (aside.seen.sum(1) == depths).all()  # with the last token, and without itself
        for sees in aside.seen:
            assert sorted(depths[sees]) == list(range(1, sees.sum() + 1))
    assert asides[3].depths == [1, 2, 3, 1, 2, 3, 4, 2, 3, 4, 5]


def test_a_guess_is_what_the_target_says_behind_its_column(target: Target) -> None:
    """The last level of a window is what the target said behind the last levels of the one before, moved on."""
    traced = Traced(Lookahead(target, window=4, ngram=3, guesses=2))
    params = SamplingParams(max_new_tokens=16, ignore_eos=True, seed=0)
    Engine(target, traced, slots=2).generate([Request(prompt, params) for prompt in PROMPTS])
    seen, checked = {text: proposal for text, proposal in traced.seen}, 0
    for text, proposal in seen.items():
        after = next((t for t in seen if len(t) > len(text) and t[: len(text)] == text), None)
        if after is None or len(proposal.aside) < 7:
            continue
        first, last = [text[-1], *proposal.aside.tokens[:3]], proposal.aside.tokens[3:]
        moved = len(after) - len(text) - 1
        for column in range(moved, 4):
            context = torch.tensor([[*text[:-1], *first[: column + 1], last[column]]])
            said = int(target.logits(target.encode(context).hidden[0, -1]).argmax())
            assert seen[after].aside.tokens[3 + column - moved] == said
            checked += 1
    assert checked > 20


def test_its_ngrams_are_accepted_where_the_text_repeats_itself(target: Target) -> None:
    params = SamplingParams(max_new_tokens=60, ignore_eos=True, seed=0)
    lookahead = Lookahead(target, window=5, ngram=4, guesses=5)
    results = Engine(target, lookahead, slots=2).generate([Request(prompt, params) for prompt in PROMPTS])
    assert max(result.tau for result in results) > 1.1


def test_where_the_context_ends_the_window_is_cut(target: Target) -> None:
    traced = Traced(Lookahead(target, window=8, ngram=3, guesses=2))
    prompt = tuple(5 + i % 50 for i in range(target.context_length - 8))
    params = SamplingParams(max_new_tokens=50, ignore_eos=True, seed=0)
    assert len(Engine(target, traced).generate([Request(prompt, params)])[0].tokens) == 8
    assert list(traced.committed[0].aside.numbers) == [0, 1, 2, 3, 4, 5, 6]
    assert list(traced.committed[1].aside.numbers) == [0, 1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 12]  # six positions are left
    assert all(known.aside.output.hidden.isfinite().all() for known in traced.committed)


def test_sizes_are_those_of_the_paper_or_of_the_tree(target: Target) -> None:
    paper = Lookahead(target)
    assert (paper.window, paper.levels, paper.guesses, paper.max_nodes) == (15, 4, 15, 61 + 59)
    small = make_proposer("lookahead", target, shape=TreeShape(3, 2, 5))
    assert (small.window, small.levels, small.guesses, small.max_nodes) == (3, 2, 3, 5 + 5)
    for sizes in ({"window": 0}, {"ngram": 1}, {"guesses": 0}):
        with pytest.raises(TercelError, match="at least one column"):
            Lookahead(target, **sizes)


def test_a_target_that_takes_no_trees_is_refused() -> None:
    other = tiny_target("llama", num_hidden_layers=2)
    other.tree_support = TreeSupport(False, True, "its attention ignores the tree mask")
    with pytest.raises(TercelError, match=r"cannot be decoded by lookahead.*ignores the tree mask; draft with pld"):
        make_proposer("lookahead", other)
