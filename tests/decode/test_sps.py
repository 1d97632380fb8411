"""Speculative sampling with a second model: its drafts are what it would say itself, its drawn ones leave the target's
distribution as it is, and a model that cannot draft is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tercel.decode import sps
from tercel.decode.calibrate import measure_costs
from tercel.decode.cost_aware import CostAware
from tercel.decode.costs import HeadCosts, StepCosts
from tercel.decode.engine import Engine
from tercel.decode.proposer import PassingOn, Proposer
from tercel.decode.proposers import make_proposer
from tercel.decode.sampling import SamplingParams
from tercel.decode.sps import SpeculativeSampling
from tercel.decode.stopwatch import Patience
from tercel.decode.types import Request
from tercel.decode.vanilla import Vanilla
from tercel.draft.shape import TreeShape
from tercel.errors import TercelError
from tercel.target_model.model import Target
from tercel.target_model.sources import Source
from tests.decode.drafts import tiny_target
from tests.decode.test_sampled_chain import ALPHA, FAULT, LENGTH, PROMPT, V, exact_joint
from tests.decode.tree_world import chi_square
from tests.tiny import tiny_model, tiny_tokenizer

PROMPTS = ((5, 6, 7, 8, 9), tuple(range(20, 45)), (30, 31), (50, 51, 52, 53))
NEW = (16, 9, 21, 12)
CHAIN, TREE = TreeShape.chain(3), TreeShape(3, 3, 8)


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target("llama", num_hidden_layers=2)


def asked(**params: float) -> list[Request]:
    base = SamplingParams(ignore_eos=True, **params)
    return [Request(p, replace(base, max_new_tokens=n)) for p, n in zip(PROMPTS, NEW, strict=True)]


class Seldom(PassingOn):
    """Drafts in every third step."""

    steps = 0

    def propose(self, rows):
        self.steps += 1
        return Vanilla().propose(rows) if self.steps % 3 else super().propose(rows)


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_target_itself_drafts_what_is_accepted(arch: str, shape: TreeShape, temperature: float) -> None:
    """Whatever rows come and go, and however long nothing was drafted: else its cache were another text's."""
    target = tiny_target(arch, num_hidden_layers=2)
    # eight nodes hold three chains of two; a greedy tree has what is likeliest, which need not be the whole text
    deepest, least = {(CHAIN, 0): (3, 3), (CHAIN, 1): (3, 3), (TREE, 0): (3, 1), (TREE, 1): (2, 2)}[shape, temperature]
    for proposer in (SpeculativeSampling(target, target, shape), Seldom(SpeculativeSampling(target, target, shape))):
        results = Engine(target, proposer, slots=3).generate(asked(temperature=temperature, seed=3))
        found = {accepted for result in results for accepted in result.accepted[:-1]}
        assert max(found) == deepest
        assert min(found - {0}) >= least
        assert (0 in found) == isinstance(proposer, Seldom)


def test_greedy_and_sampled_rows_draft_beside_each_other(target: Target) -> None:
    model = tiny_target("llama", seed=2, num_hidden_layers=1)
    pairs = zip(asked(temperature=1.0, seed=1), asked(), strict=True)
    mixed = [pair[place % 2] for place, pair in enumerate(pairs)]
    truth = [result.tokens for result in Engine(target, Vanilla()).generate(mixed)]
    found = Engine(target, SpeculativeSampling(model, target, TREE), slots=4).generate(mixed)
    assert [result.tokens for result in found][1::2] == truth[1::2]
    assert [len(result.tokens) for result in found] == list(NEW)


def drawn(shape: TreeShape | None) -> tuple[float, list[int]]:
    """The p-value of many texts, and how many drafts were accepted in their steps."""
    big, small = (tiny_model("llama", vocab_size=V, num_hidden_layers=2, initializer_range=0.3) for _ in range(2))
    noise = torch.Generator().manual_seed(1)
    for weights in small.parameters():  # near the target, and another
        weights += 0.4 * weights.std() * torch.randn(weights.shape, generator=noise)
    target, model = (Target(one, None, Source("tiny", "tiny", "folder", None)) for one in (big, small))
    params = SamplingParams(max_new_tokens=LENGTH, ignore_eos=True, temperature=0.8, top_k=5)
    # the first of 3,000 seeds that were fixed before they were drawn, which gave p = 0.41
    requests = [Request(PROMPT, replace(params, seed=seed)) for seed in range(100_000, 100_400)]
    costs = StepCosts({rows: {1: 1.0, 64: 1.1} for rows in (1, 50)}, head=HeadCosts(0.01, {1: 0.01, 50: 0.01}))
    proposer: Proposer = SpeculativeSampling(model, target, shape or TreeShape.chain(2))
    if shape is None:  # as long as pays
        proposer = CostAware(proposer, costs, steady=True)
    results = Engine(target, proposer, slots=50).generate(requests)
    p = chi_square([result.tokens for result in results], exact_joint(target, params))
    return p, [accepted for result in results for accepted in result.accepted]


@pytest.mark.parametrize("shape", [TreeShape.chain(2), TreeShape(3, 2, 7), None], ids=str)
def test_drawn_text_has_the_targets_distribution(shape: TreeShape | None) -> None:
    p, accepted = drawn(shape)
    assert p > ALPHA
    assert min(accepted.count(0), len(accepted) - accepted.count(0)) > len(accepted) / 8


def test_fault_another_distribution_than_was_drawn_from_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = sps._Drawn._distributions

    def flat(self, vocabulary):
        return lambda node: torch.full_like(right(self, vocabulary)(node), 1 / vocabulary)

    monkeypatch.setattr(sps._Drawn, "_distributions", flat)
    assert drawn(TreeShape.chain(2))[0] < FAULT


def test_a_model_of_another_tokenizer_is_refused(target: Target) -> None:
    other = Target(
        tiny_model("llama", num_hidden_layers=1), tiny_tokenizer(last_merge="2 0"), Source("o", "o", "folder", None)
    )
    with pytest.raises(TercelError, match=r"the draft model o has another tokenizer than llama: .* same family"):
        make_proposer("sps", target, model=other, shape=CHAIN)
    mamba = tiny_target("mamba", num_hidden_layers=2)
    with pytest.raises(TercelError, match=r"the draft model mamba cannot draft a chain of 3: .*; take another model"):
        make_proposer("sps", target, model=mamba, shape=CHAIN)
    with pytest.raises(TercelError, match=r"a second model, and none is given; .*--draft-model"):
        make_proposer("sps", target)


def test_a_model_of_fewer_tokens_and_positions_drafts_what_it_can(target: Target) -> None:
    model = tiny_target("llama", seed=2, num_hidden_layers=1, vocab_size=100, max_position_embeddings=24)
    for params in ({}, {"temperature": 1.0, "seed": 4}):
        proposer = SpeculativeSampling(model, target, TREE)
        results = Engine(target, proposer, slots=3).generate(asked(**params))
        assert proposer.notes() == ("the draft model llama takes 24 tokens; the text beyond them has no drafts",)
        assert results[1].nodes == results[1].steps  # its prompt is longer than that
        assert results[0].nodes > results[0].steps
        if not params:
            assert [r.tokens for r in results] == [r.tokens for r in Engine(target, Vanilla()).generate(asked())]


def test_what_its_levels_cost_is_measured_and_drafts_are_cut_to_what_pays(target: Target) -> None:
    model = tiny_target("llama", seed=2, num_hidden_layers=1)
    costs, _ = measure_costs(target, None, patience=Patience(seconds=0.0, least=1, most=1), model=model)
    assert costs.head is not None
    assert set(costs.head.levels) == {1, 4, 8, 16}
    dear = StepCosts({1: {1: 1.0, 64: 1.1}}, head=HeadCosts(9.0, {1: 9.0}))
    results = [
        Engine(target, CostAware(SpeculativeSampling(one, target, CHAIN), table, steady=True)).generate(asked())
        for one, table in ((model, dear), (target, replace(dear, head=HeadCosts(0.01, {1: 0.01}))))
    ]
    assert [r.tokens for r in results[0]] == [r.tokens for r in results[1]]
    assert sum(r.nodes for r in results[0]) < 1.5 * sum(r.steps for r in results[0])
    assert max(r.tau for r in results[1]) > 2.5
