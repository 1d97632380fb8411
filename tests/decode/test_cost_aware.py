"""Drafts as large as pays change no text, whatever they cost and whoever drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from tercel.decode import head_proposer
from tercel.decode.cost_aware import CostAware
from tercel.decode.costs import HeadCosts, StepCosts
from tercel.decode.eagle3 import Eagle3
from tercel.decode.engine import Engine
from tercel.decode.gate import Gate
from tercel.decode.head_state import HeadState
from tercel.decode.outcomes import Outcomes
from tercel.decode.proposer import PassingOn, Proposer, Row
from tercel.decode.proposers import make_proposer
from tercel.decode.sampled_chain import SampledChain
from tercel.decode.sampling import SamplingParams
from tercel.decode.types import Committed, GenerationResult, Proposal, Request
from tercel.decode.vanilla import Vanilla
from tercel.draft import DraftModel
from tercel.draft.shape import WIDEST, TreeShape
from tercel.target_model.capabilities import TreeSupport
from tercel.target_model.model import Target
from tests.decode.drafts import Oracle, random_draft, tiny_target
from tests.overfit import World

HEAD = HeadCosts(0.5, {1: 0.5, 16: 1.0})
CHEAP = StepCosts({1: {1: 20.0, 64: 24.0}, 4: {1: 20.0, 64: 30.0}}, head=HEAD)  # as on a GPU
DEAR = StepCosts({1: {1: 20.0, 2: 200.0}}, head=HEAD)
EVEN = StepCosts({1: {1: 20.0, 64: 80.0}}, head=HEAD)
PROMPTS = [tuple(range(5, 5 + n)) for n in (5, 9, 12, 30)]


def answers(target: Target, proposer: Proposer, params: SamplingParams, slots: int = 1) -> list[GenerationResult]:
    return Engine(target, proposer, slots=slots).generate([Request(prompt, params) for prompt in PROMPTS])


def tokens(results: list[GenerationResult]) -> list[tuple[int, ...]]:
    return [result.tokens for result in results]


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("costs", [CHEAP, EVEN, DEAR], ids=["cheap", "even", "dear"])
def test_no_text_changes(costs: StepCosts, temperature: float, slots: int) -> None:
    target = tiny_target("llama")
    params = SamplingParams(max_new_tokens=24, temperature=temperature, seed=4, ignore_eos=True)
    truth = tokens(answers(target, Vanilla(), params))
    drafted = answers(target, CostAware(Eagle3(random_draft(target), target, WIDEST), costs), params, slots)
    assert tokens(drafted) == truth
    oracle = Oracle(dict(zip(PROMPTS, truth, strict=True)))
    known = answers(target, CostAware(oracle, costs, steady=True), params, slots)
    assert tokens(known) == truth
    if costs is CHEAP and slots == 1:
        assert min(result.tau for result in known) > 2


def test_what_costs_is_not_drafted_and_what_does_not_is(world: World) -> None:
    params = SamplingParams(max_new_tokens=16)
    asked = [Request(prompt.tokens, params) for prompt in world.prompts]
    found = {}
    for name, costs in (("cheap", CHEAP), ("even", EVEN), ("dear", DEAR)):
        proposer = CostAware(Eagle3(world.head, world.target, WIDEST), costs, steady=True)
        results = Engine(world.target, proposer).generate(asked)
        steps = sum(result.steps for result in results)
        found[name] = sum(r.nodes for r in results) / steps, (sum(len(r.tokens) for r in results) - len(asked)) / steps
    assert found["cheap"][0] > found["even"][0] > found["dear"][0]
    assert found["cheap"][1] > 1.5
    assert found["dear"][0] < 1.3


def test_steady_costs_make_the_same_trees_every_time(world: World) -> None:
    def seen() -> list[tuple[tuple[int, ...], int]]:
        proposer = CostAware(Eagle3(world.head, world.target, WIDEST), EVEN, steady=True)
        asked = [Request(prompt.tokens, SamplingParams(max_new_tokens=20)) for prompt in world.prompts[:3]]
        return [(r.accepted, r.nodes) for r in Engine(world.target, proposer, slots=2).generate(asked)]

    assert seen() == seen()


def chain(draft: DraftModel, target: Target) -> Proposer:
    return SampledChain(draft, target, 6)


def tree(draft: DraftModel, target: Target) -> Proposer:
    return Eagle3(draft, target, WIDEST)


@pytest.mark.parametrize("make", [chain, tree])
def test_rows_come_and_go_while_the_head_is_behind(make: Callable[[DraftModel, Target], Proposer]) -> None:
    """A head that is asked now and then knows all that was committed in between: it drafts what it always would."""
    target = tiny_target("llama")
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    draft = random_draft(target, pruned=False)

    class Seldom(PassingOn):
        steps = 0

        def propose(self, rows: list[Row]) -> list[Proposal]:  # type: ignore[override]
            self.steps += 1
            if self.steps % 3:
                return Vanilla().propose(rows)
            proposals = super().propose(rows)
            for row, proposal in zip(rows, proposals, strict=True):
                drafted[tuple(row.tokens)] = proposal.tree.token_list
            return proposals

    found = []
    for slots in (1, 3):
        drafted: dict[tuple[int, ...], list[int]] = {}
        results = answers(target, Seldom(make(draft, target)), params, slots)
        found.append((tokens(results), dict(drafted)))
    always: dict[tuple[int, ...], list[int]] = {}
    drafted = always
    Seldom.steps = 2

    class Always(Seldom):
        def propose(self, rows: list[Row]) -> list[Proposal]:
            self.steps = 2
            return super().propose(rows)

    answers(target, Always(make(draft, target)), params)
    for _, seldom in found:
        common = seldom.keys() & always.keys()
        assert len(common) > 5
        assert {key: seldom[key] for key in common} == {key: always[key] for key in common}
    assert found[0][0] == found[1][0]


@pytest.mark.parametrize("make", [chain, tree])
def test_prompts_wait_for_an_idle_head_until_it_is_asked(
    make: Callable[[DraftModel, Target], Proposer], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_target("llama")
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    draft = random_draft(target, pruned=False)

    class Watched(PassingOn):
        def propose(self, rows: list[Row]) -> list[Proposal]:  # type: ignore[override]
            proposals = super().propose(rows)
            for row, proposal in zip(rows, proposals, strict=True):
                if len(proposal.tree) > 1:
                    drafted[tuple(row.tokens)] = proposal.tree.token_list[1]
            return proposals

    always: dict[tuple[int, ...], int] = {}
    drafted = always
    truth = answers(target, Watched(make(draft, target)), params)
    trials: dict[tuple[int, ...], int] = {}
    drafted = trials
    inner = make(draft, target)
    proposer = CostAware(Watched(inner), DEAR, steady=True)
    proposer.policy._gates = {rows.bit_length(): Gate(-0.5) for rows in (1, 2, 4)}
    taken = []
    fill = HeadState.fill
    monkeypatch.setattr(HeadState, "fill", lambda *args: taken.append(len(trials)) or fill(*args))
    assert tokens(answers(target, proposer, params, 3)) == tokens(truth)
    assert trials
    common = trials.keys() & always.keys()
    assert len(common) > 2
    assert {key: trials[key] for key in common} == {key: always[key] for key in common}
    assert len(taken) <= len({len(key) for key in trials}) + 1  # what came before the first trial waited for it


def test_an_idle_head_is_caught_up_with_before_too_much_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target("llama")
    monkeypatch.setattr(head_proposer, "WAITING", 16)
    inner = Eagle3(random_draft(target), target, TreeShape(2, 2, 4))
    proposer = CostAware(inner, DEAR, steady=True)
    proposer.policy._gates = {rows.bit_length(): Gate(-0.5, rows, 64, 64) for rows in (1, 2, 4)}
    held = []

    class Watched(PassingOn):
        def commit(self, committed: Sequence[Committed]) -> None:
            super().commit(committed)
            held.append((inner._held, sum(inner._waiting())))

    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    truth = tokens(answers(target, Vanilla(), params))
    assert tokens(answers(target, Watched(proposer), params, 2)) == truth
    assert all(counted == there <= 16 for counted, there in held)
    assert max(there for _, there in held) > 8  # it did wait


def test_a_target_that_takes_no_trees_gets_chains() -> None:
    target = tiny_target("llama")
    target.tree_support = TreeSupport(False, True, "its attention ignores the tree mask")
    proposer = make_proposer("eagle3", target, head=random_draft(target), costs=CHEAP)
    assert not proposer.needs_tree
    params = SamplingParams(max_new_tokens=12)
    assert tokens(answers(target, proposer, params)) == tokens(answers(target, Vanilla(), params))


def test_what_was_learned_is_there_the_next_time(world: World) -> None:
    params, asked = SamplingParams(max_new_tokens=16), world.prompts * 6

    def answer(proposer: Proposer) -> None:
        Engine(world.target, proposer).generate([Request(prompt.tokens, params) for prompt in asked])

    fixed = Eagle3(world.head, world.target, TreeShape(3, 3, 8))
    first = CostAware(fixed, CHEAP, Outcomes.of(world.target, fixed), steady=True)
    before = first.outcomes.chances.outcomes
    answer(first)
    assert first.outcomes.chances.outcomes > before + 200
    again = Outcomes.of(world.target, fixed)
    assert again.chances.outcomes == pytest.approx(first.outcomes.chances.outcomes, rel=0.5)
    assert again.chances.outcomes > before + 100
    assert Outcomes.of(world.target, Oracle({})).chances.outcomes == 0
