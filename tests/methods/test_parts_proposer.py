"""Drafts of heads on the last hidden state are those of a slow walk, path by path."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from tercel.decode.costs import StepCosts
from tercel.decode.engine import Engine
from tercel.decode.proposer import innermost
from tercel.decode.proposers import make_proposer
from tercel.decode.sampling import SamplingParams
from tercel.decode.types import Request
from tercel.draft import DraftModel
from tercel.draft.shape import TreeShape
from tercel.methods.last_hidden import LastHiddenHead
from tercel.methods.parts_proposer import PartsProposer
from tercel.methods.static_tree import likeliest_paths
from tercel.target_model.model import Target
from tests.decode.drafts import Watched, tiny_target
from tests.methods.heads import CONFIGS, random_parts

PROMPTS = [(5, 6, 7), tuple(range(20, 40)), (8,), (9, 10, 9)]
NEW = (6, 3, 8, 5)


def asked() -> list[Request]:
    return [Request(p, SamplingParams(max_new_tokens=n, ignore_eos=True)) for p, n in zip(PROMPTS, NEW, strict=True)]


def log_q_behind(target: Target, draft: DraftModel, tokens: Sequence[int], drafted: Sequence[int]) -> Tensor:
    """What the head says behind `drafted`, which follow `tokens`: `[W]`, from a forward over the whole text."""
    assert isinstance(draft.head, LastHiddenHead)
    hidden = target.encode(torch.tensor([tokens[:-1]])).hidden[0, -1]  # the target has not read the last one
    read = target.embed(torch.tensor([tokens[-1], *drafted]))
    step = len(drafted)
    logits = draft.head.logits(step, draft.head.output(step, hidden, read if draft.head.reads else None))
    return torch.log_softmax(logits, -1)


@pytest.mark.parametrize("shape", [TreeShape(3, 3, 9), TreeShape(2, 2, 7), TreeShape.chain(3)], ids=str)
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_static_tree_is_that_of_a_slow_walk(kind: str, shape: TreeShape) -> None:
    target = tiny_target("llama", num_hidden_layers=2)
    draft = random_parts(kind, target)
    watched = Watched(make_proposer(kind, target, head=draft, shape=shape))
    Engine(target, watched, slots=3).generate(asked())
    assert len({len(tokens) for tokens, _ in watched.seen}) > 4
    for tokens, proposal in watched.seen:
        tree = proposal.tree
        node_of: dict[tuple[int, ...], int] = {(): 0}  # by the tokens of its path
        for node, parent in enumerate(tree.parent_list[1:], start=1):
            above = next(path for path, number in node_of.items() if number == parent)
            node_of[*above, tree.token_list[node]] = node
        wanted = set()
        for ranks in likeliest_paths(shape):
            path: tuple[int, ...] = ()
            for rank in ranks:
                best = log_q_behind(target, draft, tokens, path).topk(shape.top_k).indices
                path = (*path, int(draft.vocabulary.ids[best[rank]]))
            wanted.add(path)
        assert set(node_of) == {(), *wanted}


@pytest.mark.parametrize("kind", CONFIGS)
def test_drafts_as_large_as_pays_say_how_likely_they_are(kind: str) -> None:
    target = tiny_target("llama", num_hidden_layers=2)
    draft = random_parts(kind, target)
    cheap = StepCosts({1: {1: 1.0, 64: 1.01}})
    watched = Watched(make_proposer(kind, target, head=draft, costs=cheap))
    Engine(target, watched, slots=3).generate(asked())
    deepest = 0
    for tokens, proposal in watched.seen:
        tree, log_q = proposal.tree, proposal.log_q
        if len(tree) == 1:
            continue
        assert log_q is not None
        paths: list[tuple[int, ...]] = [()]
        to_draft = draft.vocabulary.to_draft()
        for node, parent in enumerate(tree.parent_list[1:], start=1):
            said = log_q_behind(target, draft, tokens, paths[parent])[to_draft[tree.token_list[node]]]
            np.testing.assert_allclose(log_q[node], float(said), atol=1e-4)
            paths.append((*paths[parent], tree.token_list[node]))
        deepest = max(deepest, *tree.depth_list)
    assert deepest > 1


@pytest.mark.parametrize("kind", CONFIGS)
def test_no_tree_is_larger_than_the_head_can_draft(kind: str) -> None:
    target = tiny_target("llama", num_hidden_layers=2)
    draft = random_parts(kind, target)
    assert isinstance(draft.head, LastHiddenHead)
    for shape, most in ((TreeShape(2, 12, 12), 4), (None, 4)):
        proposer = innermost(make_proposer(kind, target, head=draft, shape=shape, costs=StepCosts({1: {1: 1.0}})))
        assert isinstance(proposer, PartsProposer)
        assert proposer.shape.depth == most
        assert proposer.head is draft.head  # what is learned of its drafts is kept with it
    whole = make_proposer(kind, target, head=draft, shape=TreeShape(2, 2, 60))
    assert whole.max_nodes == 7  # there are no more paths
