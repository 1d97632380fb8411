"""Drawn chains through the real loop: the text has exactly the target's distribution, and planted faults are caught.

A correct loop fails once in 1,000 choices of the seeds (ALPHA); the seeds are fixed, so it passes always or never. A
planted fault must fail beyond any doubt (FAULT).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from tercel.decode import verify as verify_module
from tercel.decode.engine import Engine
from tercel.decode.history import TokenHistory
from tercel.decode.sampled_chain import SampledChain
from tercel.decode.sampling import SamplingParams, target_distribution
from tercel.decode.types import GenerationResult, Request
from tercel.draft import DraftModel
from tercel.target_model.model import Target
from tercel.target_model.sources import Source
from tests.decode.drafts import random_draft
from tests.decode.tree_world import chi_square
from tests.tiny import tiny_model

ALPHA, FAULT = 1e-3, 1e-6
V, LENGTH, DEPTH, RUNS = 8, 3, 2, 500  # the first token is prefill's; a chain drafts the other two
PROMPT = (5, 1, 6, 2)


@cache
def world(pruned: bool) -> tuple[Target, DraftModel]:
    """A target of eight tokens, and a head that can draft all of them or every other one."""
    model = tiny_model("llama", vocab_size=V, num_hidden_layers=3, initializer_range=0.3)
    target = Target(model, None, Source("tiny", "tiny", "folder", None))
    draft = random_draft(target, pruned=pruned)
    draft.eagle3.lm_head.weight *= 0.5  # less sure than the target, so that many a draft is rejected
    return target, draft


@torch.no_grad()
def exact_joint(target: Target, params: SamplingParams) -> dict[tuple[int, ...], float]:
    """Of the first LENGTH tokens, by whole forwards over every beginning."""
    joint: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        logits = target.logits(target.encode(torch.tensor([[*PROMPT, *begun] for begun in joint])).hidden[:, -1])
        longer = {}
        for (begun, probability), row in zip(joint.items(), logits, strict=True):
            history = TokenHistory(PROMPT, V)
            for token in begun:
                history.push(token)
            p = target_distribution(row, params, history)
            longer |= {(*begun, t): probability * float(p[t]) for t in range(V) if p[t] > 0}
        joint = longer
    return joint


def drawn(pruned: bool) -> tuple[float, list[GenerationResult]]:
    """The p-value of RUNS texts, and the texts."""
    target, draft = world(pruned)
    params = SamplingParams(max_new_tokens=LENGTH, ignore_eos=True, temperature=0.8, top_k=5)
    asked = [Request(PROMPT, replace(params, seed=seed)) for seed in range(RUNS)]
    results = Engine(target, SampledChain(draft, target, DEPTH), slots=50).generate(asked)
    return chi_square([result.tokens for result in results], exact_joint(target, params)), results


@pytest.mark.parametrize("pruned", [False, True], ids=["whole", "pruned"])
def test_the_text_has_the_targets_distribution(pruned: bool) -> None:
    p, results = drawn(pruned)
    assert p > ALPHA
    steps = [accepted for result in results for accepted in result.accepted]
    assert min(steps.count(0), len(steps) - steps.count(0)) > len(steps) / 5  # rejected and accepted, again and again


def test_fault_one_hot_residual_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_hot(p: Tensor, q: Tensor, token: int) -> tuple[Tensor, Tensor]:
        p, q = p.clone(), q.clone()
        p[token] = q[token] = 0
        return p / p.sum(), q / q.sum()

    monkeypatch.setattr(verify_module, "reject", one_hot)
    assert drawn(False)[0] < FAULT


def test_fault_a_distribution_that_was_not_drawn_from_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    right = SampledChain._draw

    def other(self: SampledChain, logits: Tensor, row, depth: int) -> tuple[int, Tensor]:  # type: ignore[no-untyped-def]
        token, q = right(self, logits, row, depth)
        return token, q**5 / (q**5).sum()  # of a fifth of the temperature

    monkeypatch.setattr(SampledChain, "_draw", other)
    assert drawn(False)[0] < FAULT


def test_fault_draft_ids_taken_for_the_targets_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def unmapped(self: SampledChain, qs: list[Tensor]):  # type: ignore[no-untyped-def]
        return lambda node: torch.cat([qs[node] + 1e-6, torch.full((V - len(qs[node]),), 1e-6, dtype=torch.float64)])

    monkeypatch.setattr(SampledChain, "_distributions", unmapped)
    assert drawn(True)[0] < FAULT
