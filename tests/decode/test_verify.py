"""Both verification rules against the exact joint distribution, and planted faults the same test catches.

A correct rule fails such a test once in 1,000 choices of the seeds (ALPHA); the seeds are fixed, so it passes
always or never. A planted fault must fail it beyond any doubt (FAULT).
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tercel.decode import verify as verify_module
from tercel.decode.draft_tree import DraftTree
from tercel.decode.history import TokenHistory
from tercel.decode.sampling import (
    RandomStream,
    SamplingParams,
    choose_token,
    sample,
    target_distribution,
)
from tercel.decode.verify import Verdict, verify, verify_sampled_drafts
from tercel.errors import TercelError
from tests.decode.tree_world import (
    DRAFT,
    PROMPT,
    RULES,
    SETTINGS,
    WIDTHS,
    V,
    deterministic_rule,
    generate,
    new_history,
    one_by_one,
    p_value,
    place,
    sampled_rule,
    target_logits,
    top_tree_and_logits,
    tree_logits,
)

ALPHA = 1e-3
FAULT = 1e-9


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("rule", RULES)
def test_the_joint_distribution_is_the_targets(rule, setting):
    assert p_value(RULES[rule], SETTINGS[setting]) > ALPHA


def test_fault_one_hot_residual_with_a_sampled_draft_is_caught(monkeypatch):
    def one_hot_reject(p, q, token):
        p, q = p.clone(), q.clone()
        p[token] = q[token] = 0
        return p / p.sum(), q / q.sum()

    monkeypatch.setattr(verify_module, "reject", one_hot_reject)
    assert p_value(RULES["sampled chain"], SETTINGS["plain"]) < FAULT


def test_fault_draft_distribution_not_renormalised_for_the_second_sibling_is_caught(monkeypatch):
    right = verify_module.reject

    def stale_reject(p, q, token):
        rest = q.clone()
        rest[token] = 0
        return right(p, q, token)[0], rest

    monkeypatch.setattr(verify_module, "reject", stale_reject)
    assert p_value(RULES["siblings"], SETTINGS["plain"]) < FAULT


def test_fault_parents_off_by_one_are_caught():
    def crooked(params: SamplingParams, history: TokenHistory, stream: RandomStream) -> Verdict:
        tree, logits = top_tree_and_logits(*place(history), WIDTHS)
        wrong = DraftTree(tree.tokens, torch.tensor([-1, *(max(p - 1, 0) for p in tree.parent_list[1:])]))
        return verify(wrong, logits, params, history, stream)

    assert p_value(crooked, SETTINGS["plain"]) < FAULT


def test_fault_penalties_that_ignore_the_path_are_caught(monkeypatch):
    def forgetful(params: SamplingParams, history: TokenHistory, stream: RandomStream) -> Verdict:
        with monkeypatch.context() as patch:
            history.seen_counts()
            patch.setattr(history, "push", history.tokens.append)  # the path's tokens are not counted
            patch.setattr(history, "pop", lambda count: [history.tokens.pop() for _ in range(count)])
            return deterministic_rule(params, history, stream)

    assert p_value(forgetful, SETTINGS["penalties"]) < FAULT


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**64 - 1),
    setting=st.sampled_from([*SETTINGS, "greedy"]),
    widths=st.lists(st.integers(1, 3), max_size=4).map(tuple),
)
def test_verify_gives_token_for_token_what_decoding_without_a_draft_gives(seed, setting, widths):
    params = SETTINGS.get(setting, SamplingParams(repetition_penalty=1.2))

    def rule(params: SamplingParams, history: TokenHistory, stream: RandomStream) -> Verdict:
        tree, logits = top_tree_and_logits(*place(history), widths)
        return verify(tree, logits, params, history, stream)

    assert generate(rule, params, seed, 12) == generate(one_by_one, params, seed, 12)


def test_a_block_that_was_cut_does_not_shift_later_randomness():
    """Keep one token of every block: the text must be the same as with whole blocks."""
    params = SETTINGS["plain"]
    for seed in range(20):
        history, stream = new_history(), RandomStream(seed)
        while history.position < 10:
            history.push(deterministic_rule(params, history, stream).tokens[0])
        assert tuple(history.generated) == generate(deterministic_rule, params, seed, 10)


@pytest.mark.parametrize("rule", RULES)
def test_history_is_left_as_it_was_and_path_and_tokens_agree(rule):
    params = SETTINGS["penalties"]
    lengths = set()
    for seed in range(30):
        history = new_history([2, 2, 5])
        before = history.seen_counts().clone(), history.generated_counts().clone()
        verdict = RULES[rule](params, history, RandomStream(seed))
        assert history.generated == [2, 2, 5]
        assert history.seen_counts().equal(before[0])
        assert history.generated_counts().equal(before[1])
        assert verdict.tokens == (*verdict.accepted, verdict.own)
        assert len(verdict.path) == len(verdict.accepted)
        lengths.add(len(verdict.path))
    assert {0, 2} <= lengths


def test_history_is_restored_when_a_node_has_broken_logits():
    history = new_history([1])
    logits = torch.zeros(2, V)
    logits[0, 4], logits[1, 0] = 9, torch.nan
    with pytest.raises(TercelError, match="generated token 2"):
        verify(DraftTree.chain(1, [4]), logits, SamplingParams(), history, RandomStream(0))
    assert history.generated == [1]


def test_greedy_walk_by_hand():
    #   5 ─ 1 ─ 2        the target says 1 after 5, 3 after (5 1): node 3; then 0, which is no child
    #     └ 4   └ 3
    tree = DraftTree(torch.tensor([5, 1, 4, 2, 3]), torch.tensor([-1, 0, 0, 1, 1]))
    logits = torch.nn.functional.one_hot(torch.tensor([1, 3, 2, 2, 0]), V).float()
    for verdict in (
        verify(tree, logits, SamplingParams(), new_history([5]), RandomStream(0)),
        verify_sampled_drafts(
            tree,
            logits,
            lambda node: torch.full((V,), 1 / V),
            SamplingParams(),
            new_history([5]),
            RandomStream(0),
        ),
    ):
        assert verdict == Verdict(path=(1, 4), accepted=(1, 3), own=0)
        assert verdict.tokens == (1, 3, 0)


def test_root_only_is_token_by_token_decoding():
    params = SETTINGS["plain"]
    logits = target_logits(PROMPT)
    expected = choose_token(logits, params, new_history(), RandomStream(3))
    tree = DraftTree.root_only(PROMPT[-1])
    for verdict in (
        verify(tree, logits[None], params, new_history(), RandomStream(3)),
        verify_sampled_drafts(tree, logits[None], DRAFT[:1], params, new_history(), RandomStream(3)),
    ):
        assert verdict == Verdict((), (), expected)


def test_a_perfect_draft_is_always_accepted():
    params = SETTINGS["plain"]
    p = target_distribution(target_logits(PROMPT), params, new_history())
    for seed in range(200):
        stream = RandomStream(seed)
        tree = DraftTree.chain(PROMPT[-1], [sample(p, stream.for_drafts().uniform(0))])
        logits = tree_logits(tree, PROMPT[:-1])
        assert verify_sampled_drafts(tree, logits, lambda _: p, params, new_history(), stream).path == (1,)


def test_acceptance_rate_is_the_overlap_of_the_two_distributions():
    """Within 5 standard errors: a correct rule fails once in two million choices of the seeds."""
    params = SETTINGS["plain"]
    p = target_distribution(target_logits(PROMPT), params, new_history())
    overlap = float(torch.minimum(p, DRAFT[PROMPT[-1]].double()).sum())
    runs = [sampled_rule((1,))(params, new_history(), RandomStream(seed)) for seed in range(1000)]
    rate = sum(len(verdict.path) for verdict in runs) / 1000
    assert abs(rate - overlap) < 5 * (overlap * (1 - overlap) / 1000) ** 0.5


def test_mismatched_arguments_are_named():
    params, stream = SETTINGS["plain"], RandomStream(0)
    chain = DraftTree.chain(3, [1])
    with pytest.raises(TercelError, match="a draft tree of 2 nodes needs logits"):
        verify(chain, torch.zeros(3, V), params, new_history(), stream)
    with pytest.raises(TercelError, match="scatter them over the target's vocabulary"):
        verify_sampled_drafts(chain, torch.zeros(2, V), torch.ones(2, 4), params, new_history(), stream)
    twins = DraftTree(torch.tensor([3, 1, 1]), torch.tensor([-1, 0, 0]))
    logits = torch.zeros(3, V)
    logits[:, 1] = -30  # the first of the twins is rejected
    with pytest.raises(TercelError, match="siblings without replacement"):
        verify_sampled_drafts(twins, logits, torch.ones(3, V), params, new_history(), stream)
