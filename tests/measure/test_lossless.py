"""The proof must pass what is right and accuse what is wrong: faults known from public engines are
planted."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tercel.decode import verify as rules
from tercel.decode.draft_tree import DraftTree
from tercel.decode.engine import Engine
from tercel.decode.sampling import SamplingParams
from tercel.decode.types import GenerationResult, Request
from tercel.errors import TercelError
from tercel.measure.lossless import VerifyReport, check_greedy, check_sampled
from tercel.measure.rounding import run_shapes
from tercel.measure.same_seed import judge_sampled
from tercel.measure.tasks import Prompt
from tercel.target_model.model import Target
from tests.measure.worlds import PROMPTS, SOURCE, DrawnChain, OwnTree, V, small_target, vanilla
from tests.tiny import tiny_model

GREEDY = SamplingParams(max_new_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.5, max_new_tokens=4, seed=0)
PEAKED = replace(SAMPLED, temperature=0.8)
CUT = replace(SAMPLED, top_k=12, top_p=0.9, repetition_penalty=1.2)


def siblings_see_each_other(tree: DraftTree) -> Tensor:
    parents = tree.parents
    alike = parents[:, None] == parents[None]
    return RIGHT_MASK(tree) | alike


def next_nodes_ancestors(tree: DraftTree) -> Tensor:
    """Off by one: every node but the root sees what the node before it sees, and itself."""
    mask = RIGHT_MASK(tree)
    return torch.cat([mask[:1], mask[:-1]]) | torch.eye(len(tree), dtype=torch.bool)


def wrong_parent(tree, logits, params, history, stream, best=None):
    """Judges a node's children by the logits of the node's own parent."""
    return rules.verify(tree, logits[tree.parents.clamp(min=0)], params, history, stream)


def accept_anything_likely(tree, logits, params, history, stream, best=None):
    """Typical acceptance: takes any child with a fair probability. Lossy."""

    def decide(node: int) -> tuple[int, int | None]:
        p = rules.target_distribution(logits[node], params, history)
        for child in tree.children(node):
            if p[tree.token_list[child]] > 0.15:
                return tree.token_list[child], child
        return rules.choose_token(logits[node], params, history, stream), None

    return rules._walk(tree, history, decide)


def one_hot_reject(p: Tensor, q: Tensor, token: int) -> tuple[Tensor, Tensor]:
    """The residual of a deterministic draft, where the draft was sampled."""
    p, q = p.clone(), q.clone()
    p[token] = q[token] = 0
    return p / p.sum(), q / q.sum()


RIGHT_MASK = DraftTree.ancestor_mask


def tree_engine(slots: int = 1) -> Engine:
    return Engine(small_target(), OwnTree(small_target()), slots=slots)


def greedy_check():
    return check_greedy(small_target(), tree_engine(), vanilla(small_target()), PROMPTS, GREEDY)


def test_right_decoder_passes_the_greedy_check() -> None:
    steps: list[tuple[int, int]] = []
    engine = tree_engine(slots=2)
    check = check_greedy(small_target(), engine, vanilla(small_target()), PROMPTS, GREEDY, lambda *at: steps.append(at))
    assert (check.ok, check.divergences) == (True, ())
    assert (check.sequences, check.tokens) == (2, 48)
    assert check.accepted > 24  # the drafts are good, so the check had something to find
    assert steps == [(2, 2)]


@pytest.mark.parametrize("mask", [siblings_see_each_other, next_nodes_ancestors])
def test_a_wrong_tree_mask_is_wrong(monkeypatch: pytest.MonkeyPatch, mask) -> None:
    monkeypatch.setattr(DraftTree, "ancestor_mask", mask)
    check = greedy_check()
    assert not check.ok
    worst = max(check.divergences, key=lambda d: d.gap)
    assert worst.verdict == "WRONG"
    assert worst.gap > 100 * worst.noise


def test_a_wrong_parent_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tercel.decode.judge.verify", wrong_parent)
    assert any(d.verdict == "WRONG" for d in greedy_check().divergences)


def test_a_fault_of_the_target_room_does_not_excuse_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The noise is measured by the stock model: a block that sees too much must not count as rounding."""
    target = small_target()  # loaded before the fault is planted

    def everything(lengths, block_mask):
        return torch.ones(*block_mask.shape[:2], max(lengths) + block_mask.shape[1], dtype=torch.bool)

    monkeypatch.setattr("tercel.target_model.blocks.visible_slots", everything)
    check = check_greedy(target, tree_engine(), vanilla(target), PROMPTS, GREEDY)
    assert not check.ok


class Canned:
    """An engine that gives the answers it is told to."""

    def __init__(self, *answers: tuple[int, ...]) -> None:
        self.answers = answers

    def generate(self, requests) -> list[GenerationResult]:
        return [
            GenerationResult(tokens, "", "length", len(request.prompt), 1, (0,), 1, 0.1, 0.1, {})
            for request, tokens in zip(requests, self.answers, strict=True)
        ]


def test_a_divergence_is_excused_only_within_the_noise() -> None:
    target, prompt = small_target(), PROMPTS[0]
    answer = vanilla(target).generate([_request(prompt, GREEDY)])[0].tokens[:6]
    shapes = run_shapes(target, prompt.tokens, answer[:5])
    ranked = shapes.last[0].argsort(descending=True).tolist()
    assert ranked[0] == answer[5]
    other = (*answer[:5], ranked[1])
    check = check_greedy(target, Canned(other), Canned(answer), [prompt], GREEDY)
    (divergence,) = check.divergences
    assert (divergence.position, divergence.token_draft, divergence.token_vanilla) == (5, other[5], answer[5])
    top = shapes.last[0].topk(2).values
    assert divergence.gap == divergence.top2_gap == pytest.approx(float(top[0] - top[1]), abs=1e-4)
    assert 0 < divergence.noise < 1e-3 < divergence.gap
    assert divergence.verdict == "WRONG"
    assert check.tokens == 5


def test_a_tie_is_numerical() -> None:
    """Two tokens with one and the same output row have exactly equal logits: either is the target's
    choice."""
    model = tiny_model("llama", vocab_size=V, num_hidden_layers=3, initializer_range=0.3)
    first = Target(model, None, SOURCE)
    prompt = PROMPTS[0]
    best = vanilla(first).generate([_request(prompt, replace(GREEDY, max_new_tokens=1))])[0].tokens[0]
    twin = next(t for t in range(V) if t != best and t not in prompt.tokens)
    model.get_input_embeddings().weight[twin] = model.get_input_embeddings().weight[best]  # tied
    check = check_greedy(first, Canned((twin,)), Canned((best,)), [prompt], GREEDY)
    assert [d.verdict for d in check.divergences] == ["numerical"]
    assert check.ok


def test_an_answer_that_ends_elsewhere_is_wrong() -> None:
    check = check_greedy(small_target(), Canned((4, 5, 6)), Canned((4, 5)), PROMPTS[:1], GREEDY)
    (divergence,) = check.divergences
    assert (divergence.position, divergence.token_draft, divergence.token_vanilla) == (2, 6, None)
    assert divergence.verdict == "WRONG"


@pytest.mark.parametrize("params", [SAMPLED, CUT], ids=["plain", "cut"])
def test_right_tree_passes_the_sampled_check(params: SamplingParams) -> None:
    done: list[tuple[int, int]] = []
    check = check_sampled(
        small_target(),
        tree_engine(slots=4),
        PROMPTS,
        25,
        params,
        vanilla=vanilla(small_target(), slots=4),
        progress=lambda *at: done.append(at),
    )
    assert check.ok
    assert check.same_seed is not None
    assert (check.same_seed.divergences, check.same_seed.tokens) == ((), 200)
    assert (check.samples, check.tokens, check.impossible) == (50, 200, 0)
    assert check.accepted > 25
    assert {"pit_ks", "pit_chi_square", "token_1_chi_square"} <= set(check.tests)
    assert done[-1] == (50, 50)


def test_right_sampled_drafts_pass_without_the_seed_comparison() -> None:
    engine = Engine(small_target(), DrawnChain(small_target()))
    check = check_sampled(small_target(), engine, PROMPTS, 90, SAMPLED)
    assert check.ok
    assert check.same_seed is None
    assert check.accepted > 100
    assert "drafts" in check.tests


def test_one_hot_residual_with_sampled_drafts_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "reject", one_hot_reject)
    engine = Engine(small_target(), DrawnChain(small_target()))
    check = check_sampled(small_target(), engine, PROMPTS, 90, SAMPLED)
    assert not check.ok
    assert check.p_value < check.alpha == 1e-3
    assert check.tests["token_1_chi_square"] > check.alpha  # prefill's own token is not affected


@pytest.mark.parametrize("rule", [wrong_parent, accept_anything_likely])
def test_wrong_rules_are_found_by_distribution_alone(monkeypatch: pytest.MonkeyPatch, rule) -> None:
    monkeypatch.setattr("tercel.decode.judge.verify", rule)
    check = check_sampled(small_target(), tree_engine(), PROMPTS, 50, PEAKED)
    assert check.p_value < check.alpha


@pytest.mark.parametrize("mask", [siblings_see_each_other, next_nodes_ancestors])
def test_a_wrong_mask_is_found_by_seed(monkeypatch: pytest.MonkeyPatch, mask) -> None:
    monkeypatch.setattr(DraftTree, "ancestor_mask", mask)
    check = check_sampled(small_target(), tree_engine(), PROMPTS, 12, SAMPLED, vanilla=vanilla(small_target()))
    assert check.same_seed is not None
    assert not check.same_seed.ok
    assert not check.ok


def test_an_impossible_token_is_wrong_whatever_the_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    def runner_up(tree, logits, params, history, stream, best=None):
        return rules.Verdict((), (), int(logits[0].topk(2).indices[1]))

    monkeypatch.setattr("tercel.decode.judge.verify", runner_up)
    params = replace(SAMPLED, top_k=1, max_new_tokens=2)
    check = check_sampled(small_target(), vanilla(small_target()), PROMPTS[:1], 3, params)
    assert (check.tokens, check.impossible, check.p_value, check.ok) == (6, 3, 0.0, False)


def test_a_sampled_divergence_is_judged_by_the_random_number() -> None:
    target, prompt = small_target(), PROMPTS[0]
    params = replace(SAMPLED, seed=3)
    answer = vanilla(target).generate([_request(prompt, params)])[0].tokens
    other = (*answer[:2], (answer[2] + 5) % 24, *answer[3:])
    divergence = judge_sampled(target, prompt, other, answer, 2, params)
    assert divergence.verdict == "WRONG"
    assert divergence.gap > divergence.noise > 0


def test_report_as_json() -> None:
    greedy = greedy_check()
    sampled = check_sampled(small_target(), tree_engine(), PROMPTS[:1], 20, SAMPLED)
    report = VerifyReport(greedy, sampled)
    value = json.loads(json.dumps(report.to_json()))
    assert value["ok"] is report.ok is True
    assert value["greedy"] == {
        "sequences": 2,
        "identical": 2,
        "tokens": 48,
        "accepted": greedy.accepted,
        "divergences": [],
        "ok": True,
    }
    assert value["sampled"]["p_value"] == sampled.p_value
    assert VerifyReport(None, None).ok is False


def test_bad_settings_are_refused() -> None:
    engine = vanilla(small_target())
    with pytest.raises(TercelError, match="temperature 0"):
        check_greedy(small_target(), engine, engine, PROMPTS, SAMPLED)
    with pytest.raises(TercelError, match="at least one prompt"):
        check_greedy(small_target(), engine, engine, [], GREEDY)
    with pytest.raises(TercelError, match="temperature above 0"):
        check_sampled(small_target(), engine, PROMPTS, 5, GREEDY)
    with pytest.raises(TercelError, match="error rate"):
        check_sampled(small_target(), engine, PROMPTS, 5, SAMPLED, alpha=0.0)


def _request(prompt: Prompt, params: SamplingParams):
    return Request(prompt.tokens, params)
