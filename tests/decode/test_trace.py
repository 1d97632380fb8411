"""Records of steps: what they tell is what verification did, and asking for them changes no token."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tercel.decode import loop as loop_module
from tercel.decode import trace as trace_module
from tercel.decode.draft_tree import DraftTree
from tercel.decode.eagle3 import Eagle3
from tercel.decode.engine import Engine
from tercel.decode.pld import PromptLookup
from tercel.decode.proposer import Proposer
from tercel.decode.sampled_chain import SampledChain
from tercel.decode.sampling import RandomStream, SamplingParams
from tercel.decode.trace import StepTrace, trace_step
from tercel.decode.types import Event, Proposal, Request
from tercel.decode.typical import Typical
from tercel.decode.verify import verify, verify_sampled_drafts
from tercel.draft.shape import TreeShape
from tercel.target_model.model import Target
from tests.decode.drafts import Oracle, random_draft, tiny_target
from tests.decode.tree_world import DRAFT, V, new_history, target_logits, tree_logits

PROMPTS = [(9, 10, 9, 9, 10, 9), (5, 6, 7)]
GREEDY = SamplingParams(ignore_eos=True, max_new_tokens=10)
PENALISED = replace(GREEDY, repetition_penalty=1.3)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, seed=3, ignore_eos=True, max_new_tokens=10)


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target("llama", num_hidden_layers=3)


def proposers(target: Target) -> dict[str, Proposer]:
    texts = Engine(target, PromptLookup()).generate([Request(prompt, GREEDY) for prompt in PROMPTS])
    answers = {prompt: result.tokens for prompt, result in zip(PROMPTS, texts, strict=True)}
    draft = random_draft(target)
    return {
        "tree": Eagle3(draft, target, TreeShape(3, 2, 7)),
        "oracle": Oracle(answers),
        "pld": PromptLookup(),
        "drawn": SampledChain(draft, target, 3),
    }


def events_of(target: Target, proposer: Proposer, params: SamplingParams, traced: bool) -> list[list[Event]]:
    requests = [Request(prompt, params, traced=traced) for prompt in PROMPTS]
    events: list[list[Event]] = [[] for _ in requests]
    for event in Engine(target, proposer, slots=2).stream(requests):
        events[event.index].append(event)
    return events


@pytest.mark.parametrize("params", [GREEDY, PENALISED, SAMPLED], ids=["greedy", "penalised", "sampled"])
@pytest.mark.parametrize("name", ["tree", "oracle", "pld", "drawn"])
def test_a_record_tells_what_the_step_did(target: Target, name: str, params: SamplingParams) -> None:
    proposer = proposers(target)[name]
    plain = events_of(target, proposer, params, traced=False)
    for prompt, seen, told in zip(PROMPTS, plain, events_of(target, proposer, params, traced=True), strict=True):
        assert [event.trace for event in seen] == [None] * len(seen)
        assert [event.emission for event in told] == [event.emission for event in seen]
        done, last = 0, prompt[-1]
        for event in told:
            trace, tokens = event.trace, event.emission.tokens
            assert trace is not None
            assert (trace.position, trace.tokens[: len(tokens)]) == (done, tokens)
            assert trace.nodes[0].token == last
            assert (trace.split == {}) == (done == 0)
            check(trace, params, drawn=name == "drawn")
            done, last = done + len(tokens), tokens[-1]


def check(trace: StepTrace, params: SamplingParams, drawn: bool) -> None:
    """A record against itself."""
    assert tuple(choice.node for choice in trace.choices) == (0, *trace.path)
    for choice, below in zip(trace.choices, [*trace.path, None], strict=True):
        likeliest = [chance for _, chance in choice.likeliest]
        assert likeliest == sorted(likeliest, reverse=True)
        assert sum(likeliest) <= 1 + 1e-9
        assert 0 <= choice.probability <= likeliest[0]
        if params.greedy:
            assert choice.token == choice.likeliest[0][0]
            assert choice.uniform is None
        if below is not None:
            assert trace.nodes[below].token == choice.token
            assert trace.nodes[below].parent == choice.node
            assert trace.nodes[below].target == pytest.approx(choice.probability)
        accepted = any(trial.accepted for trial in choice.trials)
        assert accepted == (below is not None and drawn and not params.greedy)
        if not params.greedy and not accepted:
            assert choice.uniform is not None
            assert choice.span is not None
            assert choice.span[0] <= choice.uniform < choice.span[1]
            if not choice.trials:
                assert choice.span[1] - choice.span[0] == pytest.approx(choice.probability)


def test_probabilities_are_the_targets_behind_that_very_path(target: Target) -> None:
    told = [event.trace for event in events_of(target, proposers(target)["oracle"], GREEDY, traced=True)[0]]
    trace = next(trace for trace in told if trace is not None and len(trace.path) > 1)
    answer = [token for one in told if one is not None for token in one.tokens]
    text = [*PROMPTS[0], *answer[: trace.position]]
    for number, node in enumerate(trace.nodes[1:], start=1):
        path, at = list[int](), node.parent
        while at > 0:
            path.insert(0, trace.nodes[at].token)
            at = trace.nodes[at].parent
        logits = target.logits(target.encode(torch.tensor([[*text, *path]])).hidden[:, -1])[0]
        assert node.target == pytest.approx(float(logits.double().softmax(-1)[node.token]), rel=1e-3, abs=1e-6), number
        assert node.draft is None  # which this proposer does not tell


def test_what_the_draft_says_of_itself_is_told(target: Target) -> None:
    for params, name in ((GREEDY, "tree"), (SAMPLED, "tree"), (SAMPLED, "drawn")):
        events = events_of(target, proposers(target)[name], params, traced=True)[1]
        drafted = [node.draft for event in events if event.trace is not None for node in event.trace.nodes[1:]]
        assert drafted
        assert all(chance is not None and 0 < chance <= 1 for chance in drafted)
    tree = DraftTree([0, 1, 2], [-1, 0, 0])
    wild = Proposal(tree, log_q=np.array([0.0, -np.inf, np.nan]))
    trace = trace_of(wild, tree_logits(tree, [3]), GREEDY)
    assert [node.draft for node in trace.nodes] == [None, 0.0, None]  # what is no number is no JSON either


def trace_of(proposal: Proposal, logits: torch.Tensor, params: SamplingParams, seed: int = 0) -> StepTrace:
    how = (params, new_history(), RandomStream(seed))
    if proposal.distributions is None:
        verdict = verify(proposal.tree, logits, *how)
    else:
        verdict = verify_sampled_drafts(proposal.tree, logits, proposal.distributions, *how)
    before = list(how[1].tokens)
    trace = trace_step(proposal, logits, verdict, *how)
    assert how[1].tokens == before
    assert trace.tokens == verdict.tokens
    return trace


def test_drafts_that_were_drawn_have_their_trials_told() -> None:
    """The spans of what is left after rejections differ from the target's own chances, and hold the number drawn."""
    own = target_logits([0, 3]).double().softmax(-1)
    unlikely = (own / DRAFT[3]).argsort()[:3].tolist()  # which the draft likes better than the target
    tree = DraftTree([3, *unlikely], [-1, 0, 0, 0])
    logits = tree_logits(tree, [0])
    outcomes = set()
    for seed in range(60):
        trace = trace_of(Proposal(tree, lambda node: DRAFT[tree.token_list[node]]), logits, SAMPLED_PLAIN, seed)
        first = trace.choices[0]
        assert [trial.child for trial in first.trials] == list(range(1, len(first.trials) + 1))
        assert [trial.accepted for trial in first.trials[:-1]] == [False] * (len(first.trials) - 1)
        assert first.trials[0].target == pytest.approx(float(own[unlikely[0]]), rel=1e-6)
        assert first.probability == pytest.approx(float(own[first.token]), rel=1e-6)
        outcomes.add((len(first.trials), bool(trace.path)))
        if not trace.path:
            assert first.span is not None
            assert first.span[0] <= (first.uniform or 0) < first.span[1]
    assert len(outcomes) > 2
    assert {own for _, own in outcomes} == {True, False}


SAMPLED_PLAIN = SamplingParams(temperature=1.0)


def test_paths_on_which_the_target_says_nothing_are_told_so() -> None:
    """A node that verification never visits may be beyond the request's rules, or no number at all."""
    tree = DraftTree([3, 4, 5, 1, 2], [-1, 0, 1, 0, 3])
    logits = tree_logits(tree, [0])
    logits[0] = torch.nn.functional.one_hot(torch.tensor(4), V) * 9.0
    logits[3] = torch.nan
    trace = trace_of(Proposal(tree), logits, GREEDY)
    assert [node.target is None for node in trace.nodes] == [True, False, False, False, True]
    assert trace.path[0] == 1


def test_whoever_asks_for_no_record_pays_for_none(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("trace_rows", "trace_first"):
        monkeypatch.setattr(loop_module, name, None)
    events_of(target, proposers(target)["pld"], GREEDY, traced=False)


def test_a_record_that_cannot_be_made_leaves_the_answer_as_it_is(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*of: object) -> StepTrace:
        raise RuntimeError("a constraint that contradicts itself")

    truth = events_of(target, proposers(target)["pld"], GREEDY, traced=False)
    monkeypatch.setattr(trace_module, "trace_step", fails)
    told = events_of(target, proposers(target)["pld"], GREEDY, traced=True)
    assert [event.emission for row in told for event in row] == [event.emission for row in truth for event in row]
    for event in (event for row in told for event in row):
        assert event.trace.tokens[: len(event.emission.tokens)] == event.emission.tokens
        assert len(event.trace.nodes) == max(event.nodes, 1)
        assert {choice.probability for choice in event.trace.choices} == {None}


def test_a_lossy_rule_is_told_from_the_targets_choice(target: Target) -> None:
    """Where it lets a token pass that the target would not have drawn, no number is said to have drawn it."""
    proposer = proposers(target)["oracle"]
    proposer.lossy = Typical(epsilon=1e-9, delta=1e-9)
    told = [event.trace for row in events_of(target, proposer, SAMPLED, traced=True) for event in row]
    choices = [choice for trace in told if trace is not None for choice in trace.choices]
    assert {choice.lossy for choice in choices} == {True, False}
    for choice in choices:
        assert choice.lossy == (choice.uniform is None)
    for trace in filter(None, told):
        assert not trace.choices[-1].lossy
