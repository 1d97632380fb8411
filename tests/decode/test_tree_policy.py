"""The size of drafts: what pays is chosen, as trying everything would, and never what decoding without outdoes."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tercel.decode.chances import Chances
from tercel.decode.costs import HeadCosts, LiveCosts, StepCosts
from tercel.decode.draft_tree import DraftTree
from tercel.decode.tree_policy import Step, TreePolicy
from tercel.decode.types import Committed, Proposal

FLAT, STEEP = {1: 20.0, 64: 21.0}, {1: 20.0, 64: 1300.0}

Tree = tuple[list[int], list[float]]  # parents, chances of whole paths


def policy_of(forward: dict[int, float], head: HeadCosts | None = None, most: int = 64) -> TreePolicy:
    return TreePolicy(LiveCosts(StepCosts({1: forward}, head=head)), Chances(), most)


def step_of(forward: dict[int, float], rows: int = 1, head: HeadCosts | None = None, most: int = 64) -> Step:
    policy = policy_of(forward, head, most)
    policy.begin([False] * rows, 100)
    return policy.step


@st.composite
def costs(draw: st.DrawFn, most: int = 8) -> dict[int, float]:
    steps = draw(st.lists(st.floats(0, 8), min_size=most, max_size=most))
    return {n + 1: 5 + sum(steps[: n + 1]) for n in range(most)}


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    """Parents of up to 7 nodes, -1 for the root, and chances of whole paths."""
    count = draw(st.integers(1, 7))
    parents = [draw(st.integers(-1, node - 1)) for node in range(count)]
    paths: list[float] = []
    for parent in parents:
        paths.append(draw(st.floats(0.01, 0.99)) * (1.0 if parent < 0 else paths[parent]))
    return parents, paths


def value(step: Step, paths: list[float]) -> float:
    """Of a tree of such nodes: tokens, less what the step's price is for its time."""
    return sum(paths) - step.price * float(step.curve[len(paths)] - step.curve[0])


@given(costs(), trees())
@settings(max_examples=60, deadline=None)
def test_the_likeliest_nodes_are_the_best_of_all_trees(forward: dict[int, float], tree: Tree) -> None:
    parents, paths = tree
    step = step_of(forward, most=8)
    closed = [
        [paths[node] for node in nodes]
        for size in range(len(parents) + 1)
        for nodes in combinations(range(len(parents)), size)
        if all(parents[node] < 0 or parents[node] in nodes for node in nodes)
    ]
    table = np.array([paths])
    best = max(value(step, some) for some in closed)
    assert step.worth(table) == pytest.approx(best, abs=1e-9)
    chosen = sorted(paths, reverse=True)[: step.size(table) - 1]
    assert value(step, chosen) == pytest.approx(best, abs=1e-9)


@given(costs(), trees(), st.integers(1, 4), st.floats(0.5, 4))
@settings(max_examples=60, deadline=None)
def test_no_tree_is_slower_than_none(
    forward: dict[int, float], tree: Tree, rows: int, achieved: float
) -> None:
    policy = policy_of(forward, most=8)
    policy._tokens, policy._time = achieved, 1.0  # whatever went before
    policy.begin([False] * rows, 10)
    step = policy.step
    nodes = step.size(np.array([tree[1]] * rows))
    tokens = rows * (1 + sum(sorted(tree[1], reverse=True)[: nodes - 1]))
    assert tokens / step.curve[nodes - 1] >= rows / step.curve[0] * (1 - 1e-9)


@given(costs(), trees(), st.floats(1, 5))
@settings(max_examples=60, deadline=None)
def test_dearer_nodes_are_never_more(forward: dict[int, float], tree: Tree, factor: float) -> None:
    table = np.array([tree[1]])
    dearer = {n: forward[1] + factor * (ms - forward[1]) for n, ms in forward.items()}
    assert step_of(dearer, most=8).size(table) <= step_of(forward, most=8).size(table)


def test_the_same_chances_for_many_rows_are_fewer_nodes() -> None:
    chances, forward = np.array([[0.5, 0.3, 0.2, 0.1]]), {1: 20.0, 8: 21.0, 16: 40.0, 32: 80.0, 64: 160.0}
    sizes = [step_of(forward, rows, most=8).size(np.repeat(chances, rows, 0)) for rows in (1, 4, 16)]
    assert sizes[0] == 5
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == 1


def log_q(*levels: float) -> np.ndarray:
    return np.log(np.array(levels))[None, None]


def test_levels_end_where_they_cost_more_than_they_bring() -> None:
    children = log_q(0.5, 0.2, 0.1)
    for head, goes_on in ((HeadCosts(0.1, {1: 0.01, 8: 0.02}), True), (HeadCosts(0.1, {1: 30.0}), False)):
        step = step_of(FLAT, head=head)
        chosen = step.grow(children, 1, 8)
        assert (chosen is not None) == goes_on
        if chosen is not None:
            assert chosen[0].tolist() == list(range(chosen.shape[1]))
            deeper = step.grow(np.repeat(children, chosen.shape[1], 1), 2, 8)
            assert deeper is not None
            assert deeper[0, 0] == 0  # the likeliest path
        paths, nodes = step.grown()
        assert nodes == 1 + paths.shape[1]  # where nodes cost next to nothing all are taken


@given(st.integers(0, 999), st.sampled_from([1, 3]), st.floats(0.001, 8), st.floats(0.01, 4))
@settings(max_examples=40, deadline=None)
def test_levels_are_as_wide_as_trying_every_width_says(seed: int, rows: int, node: float, level: float) -> None:
    step = step_of({1: 20.0, 64: 20 + 63 * node}, rows, HeadCosts(0.1, {1: level, 16: 2 * level}))
    drafts = -np.cumsum(np.random.default_rng(seed).exponential(0.7, (rows, 1, 6)), 2)
    chosen = step.grow(drafts, 1, 6)
    known = step.policy.chances.of(drafts, 1, False)[:, 0]  # of whole paths, the likeliest first
    values = {0: step.worth(known)}
    for width in (1, 2, 4, 6):
        hoped = known[:, :width, None] * step.policy.children(1)
        cost = step.price * step.policy.costs.level_ms(rows * width)
        values[width] = step.worth(np.concatenate([known, hoped.reshape(rows, -1)], 1)) - cost
    assert values[0 if chosen is None else chosen.shape[1]] == pytest.approx(max(values.values()), abs=1e-9)


def test_what_grew_as_large_as_pays_is_not_judged_again() -> None:
    step = step_of(STEEP, head=HeadCosts(0.1, {1: 0.1}))
    step.grow(log_q(0.9, 0.05), 1, 0)
    step.grown()
    grown = Proposal(DraftTree.chain(5, (6,)), log_q=np.log(np.array([1, 0.9])))
    assert step.choose([grown]) == [grown]


def test_where_nothing_pays_a_draft_is_tried_ever_more_rarely_and_comes_back() -> None:
    policy = policy_of(STEEP, HeadCosts(20.0, {1: 20.0}))
    tree = Proposal(DraftTree(np_to(7, 8), np_to(-1, 0)), log_q=np.array([0.0, np.log(0.3)]))
    drafted = []
    for _ in range(400):
        drafted.append(policy.begin([False], 50))
        if drafted[-1]:
            policy.step.choose([tree])
            policy.step.learn([0], [tree], [Committed((9,), ())])
    assert sum(drafted[-200:]) <= 5
    assert any(drafted[-100:])
    cheap = policy_of(FLAT)
    policy.costs = cheap.costs  # the machine has become another
    sure = Proposal(tree.tree, log_q=np.array([0.0, np.log(0.999)]))
    again = []
    for _ in range(300):
        again.append(policy.begin([False], 50))
        if again[-1]:
            policy.step.choose([sure])
            policy.step.learn([0], [sure], [Committed((8, 9), ())])
    assert all(again[-50:])


def np_to(*values: int):
    import torch

    return torch.tensor(values)


def test_drawn_drafts_are_not_looked_at() -> None:
    step = step_of(STEEP)
    drawn = Proposal(DraftTree.chain(5, (6, 7)), lambda node: np_to(1), np.log(np.array([1, 1e-6, 1e-6])))
    assert step.choose([drawn]) == [drawn]


def test_chains_are_as_long_as_pays_by_what_was_accepted_before() -> None:
    policy = policy_of({1: 20.0, 8: 28.0}, HeadCosts(1.0, {1: 1.0}))
    lengths = []
    for accepted in (0, 6):
        for _ in range(400):
            policy.begin([True], 50)
            chain = DraftTree.chain(5, tuple(range(10, 16)))
            committed = Committed((*range(10, 10 + accepted), 99), ())
            policy.step.learn([0], [Proposal(chain, lambda node: np_to(1))], [committed])
        policy.begin([True], 50)
        lengths.append(policy.step.chain_depth(6))
    assert lengths == [0, 6]
