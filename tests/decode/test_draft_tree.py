"""Trees are trees, masks are the ancestors, and the best nodes are chosen with their parents."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tercel.decode.draft_tree import DraftTree, Selection, select_best
from tercel.errors import TercelError


def tensor(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.long)


@st.composite
def parent_lists(draw, most: int = 20) -> list[int]:
    count = draw(st.integers(1, most))
    return [-1] + [draw(st.integers(0, node - 1)) for node in range(1, count)]


def ancestors(parents: list[int], node: int) -> set[int]:
    found = set()
    while node >= 0:
        found.add(node)
        node = parents[node]
    return found


@settings(max_examples=60)
@given(parents=parent_lists())
def test_mask_depths_and_children_against_brute_force(parents):
    tree = DraftTree(torch.arange(len(parents)), tensor(parents))
    mask = tree.ancestor_mask()
    assert mask.dtype == torch.bool
    for node in range(len(parents)):
        family = ancestors(parents, node)
        assert set(mask[node].nonzero().squeeze(1).tolist()) == family
        assert tree.depth_list[node] == len(family) - 1
        assert tree.children(node) == [c for c, p in enumerate(parents) if p == node]


def test_chain_and_root_only():
    chain = DraftTree.chain(7, [8, 9])
    assert chain.token_list == [7, 8, 9]
    assert chain.parent_list == [-1, 0, 1]
    assert chain.ancestor_mask().equal(torch.ones(3, 3).tril().bool())
    assert len(DraftTree.root_only(7)) == 1


@pytest.mark.parametrize("parents", [[0], [-1, 1], [-1, -1], [-1, 2, 0], [-1, -2], [-2]])
def test_parents_must_come_first(parents):
    with pytest.raises(TercelError, match=r"node \d of the draft tree has parent"):
        DraftTree(torch.zeros(len(parents), dtype=torch.long), tensor(parents))


def test_shapes_must_agree():
    with pytest.raises(TercelError, match="one parent per token"):
        DraftTree(tensor([1, 2]), tensor([-1]))
    with pytest.raises(TercelError, match="one parent per token"):
        DraftTree(tensor([]), tensor([]))


@st.composite
def proposals(draw, most: int, rounding: bool = False):
    """Scores, depths, parents of nodes behind a root; steps of 0 (p = 1) are common, so scores tie."""
    parents = [p - 1 for p in draw(parent_lists(most + 1))[1:]]
    scores: list[float] = []
    depths: list[int] = []
    for parent in parents:
        step = draw(st.sampled_from([0.0, 0.0, -1.0, -0.5, -math.inf]))
        if rounding:
            step = draw(st.sampled_from([step, 1e-7]))
        scores.append((scores[parent] if parent >= 0 else 0.0) + step)
        depths.append(1 + (depths[parent] if parent >= 0 else 0))
    return scores, depths, parents


def select(scores, depths, parents, n) -> Selection:
    return select_best(torch.tensor(scores), tensor(depths), tensor(parents), n)


@settings(max_examples=80)
@given(proposal=proposals(40, rounding=True), n=st.integers(0, 45))
def test_every_chosen_node_has_its_parent_before_it(proposal, n):
    scores, depths, parents = proposal
    chosen = select(scores, depths, parents, n)
    indices = chosen.indices.tolist()
    assert indices == sorted(set(indices))
    assert len(indices) == min(n, len(scores))
    for place, (index, parent) in enumerate(zip(indices, chosen.parents.tolist(), strict=True)):
        assert parent < place + 1
        assert (indices[parent - 1] if parent else -1) == parents[index]
    # The two make a tree behind any root.
    DraftTree(tensor([99, *indices]), torch.cat([tensor([-1]), chosen.parents]))


@settings(max_examples=60, deadline=None)
@given(proposal=proposals(8), n=st.integers(1, 8))
def test_the_chosen_set_is_the_best_closed_one(proposal, n):
    scores, depths, parents = proposal
    n = min(n, len(scores))
    closed = [
        nodes
        for nodes in itertools.combinations(range(len(scores)), n)
        if all(parents[i] < 0 or parents[i] in nodes for i in nodes)
    ]
    best = max(sum(map(math.exp, (scores[i] for i in nodes))) for nodes in closed)  # expected accepted tokens
    indices = select(scores, depths, parents, n).indices.tolist()
    assert sum(math.exp(scores[i]) for i in indices) == pytest.approx(best)


def test_equal_scores_go_to_the_shallow_and_then_to_the_first():
    # 0 ─ 1 ─ 2 and 3, 4 beside 0: all certain.
    chosen = select([0.0] * 5, [1, 2, 3, 1, 1], [-1, 0, 1, -1, -1], 3)
    assert chosen.indices.tolist() == [0, 3, 4]
    assert chosen.parents.tolist() == [0, 0, 0]


def test_a_child_that_rounding_lifted_above_its_parent_does_not_overtake_it():
    chosen = select([-1.0, -1.5, -0.9], [1, 1, 2], [-1, -1, 1], 2)  # node 2's parent scores -1.5
    assert chosen.indices.tolist() == [0, 1]


def test_a_child_before_its_parent_is_refused():
    with pytest.raises(TercelError, match="does not come after its parent"):
        select([0.0, 0.0], [2, 1], [1, -1], 2)


def test_nothing_proposed_gives_nothing():
    chosen = select_best(torch.empty(0), tensor([]), tensor([]), 5)
    assert len(chosen.indices) == len(chosen.parents) == 0
