"""Tokens that are computed beside a tree: what they see, what is handed back of them, and what a cut leaves of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tercel.decode.draft_tree import DraftTree
from tercel.decode.engine import Engine
from tercel.decode.proposer import Proposer
from tercel.decode.sampling import SamplingParams
from tercel.decode.types import Aside, Proposal, Request
from tercel.decode.vanilla import Vanilla
from tercel.errors import TercelError
from tests.decode.drafts import tiny_target

SEEN = np.array([[1, 0, 0], [1, 1, 0], [0, 0, 1]], dtype=bool)
PROMPTS = ((5, 6, 7, 8, 9), (30, 31, 32), (40, 41))


class Looking(Proposer):
    """A draft or two; two tokens hang at the first draft, one behind the other, and one at the root."""

    name, max_nodes, needs_tree, feature_layers = "looking", 6, True, (1,)

    def __init__(self) -> None:
        self.asked, self.found = [], []

    def propose(self, rows):
        self.asked = [list(row.tokens) for row in rows]
        aside = Aside((20, 21, 22), (2, 3, 1), SEEN, at=(1, 1, 0))
        trees = [DraftTree.merged(row.tokens[-1], [(11,), (12,)][: len(row.tokens) % 2 + 1], 3) for row in rows]
        return [Proposal(tree, aside=aside) for tree in trees]

    def select_rows(self, rows):
        self.asked = [self.asked[row] for row in rows]

    def commit(self, committed):
        self.found += zip(self.asked, committed, strict=True)


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_they_see_the_text_their_node_and_each_other_as_said(arch: str) -> None:
    target, looking = tiny_target(arch, num_hidden_layers=2), Looking()
    params = SamplingParams(max_new_tokens=6, ignore_eos=True)
    asked = [Request(prompt, params) for prompt in PROMPTS]
    results = Engine(target, looking, slots=2).generate(asked)
    assert [r.tokens for r in results] == [r.tokens for r in Engine(target, Vanilla()).generate(asked)]
    assert len(looking.found) > 10
    for text, known in looking.found:
        assert list(known.aside.numbers) == [0, 1, 2]
        for place, path in enumerate(([11, 20], [11, 20, 21], [22])):
            whole = target.encode(torch.tensor([[*text, *path]]), (1,))
            torch.testing.assert_close(known.aside.output.hidden[0, place], whole.hidden[0, -1], rtol=1e-3, atol=1e-3)
            torch.testing.assert_close(
                known.aside.output.layers[0][0, place], whole.layers[0][0, -1], rtol=1e-3, atol=1e-3
            )


def test_a_cut_leaves_those_that_lose_nothing_they_see() -> None:
    tree = DraftTree.merged(1, [(11, 13), (12,)], 4)
    proposal = Proposal(tree, aside=Aside((20, 21, 22), (3, 4, 1), SEEN, at=(2, 2, 3)))
    assert proposal.width == 7
    assert proposal.up_to(9) is proposal
    assert proposal.up_to(3).aside.numbers == [0, 2]
    near = proposal.up_to(1)
    assert (near.tree.token_list, near.aside.tokens, near.aside.at, near.aside.numbers) == ([1, 11, 12], [22], [2], [2])
    assert near.up_to(0).aside is None
    best = proposal.best(np.array([1, 0.5, 0.4, 0.1]), 3)
    assert (best.tree.token_list, best.aside.numbers, best.aside.at) == ([1, 11, 13], [0, 1], [2, 2])
    late = Aside((20, 21), (1, 5), np.ones((2, 2), bool))
    assert Proposal(tree, aside=late).up_to(4).aside is None  # each sees the other


@pytest.mark.parametrize(
    "wrong",
    [((), (), np.ones((0, 0), bool)), ((1,), (0,), np.ones((1, 1), bool)), ((1,), (1, 2), np.ones((1, 1), bool)),
     ((1,), (1,), np.zeros((1, 1), bool)), ((1, 2), (1, 1), np.ones((1, 2), bool))],
)  # fmt: skip
def test_what_is_no_aside(wrong) -> None:
    with pytest.raises(TercelError, match="tokens beside a draft tree need"):
        Aside(*wrong)
