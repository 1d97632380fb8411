"""The walk over simulated chains against chains really decoded: the same steps, so the same τ and n-α."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tercel.decode.eagle3 import Eagle3
from tercel.decode.engine import Engine
from tercel.decode.sampling import SamplingParams
from tercel.decode.types import GenerationResult, Request
from tercel.draft import DraftModel, DraftVocabulary, HeadInfo
from tercel.draft.history import HeldOut
from tercel.draft.shape import TreeShape
from tercel.interop.card import held_out_basis
from tercel.measure.acceptance import count_alpha
from tercel.train.acceptance import chains_of, simulate
from tercel.train.batches import TokenizedChat
from tercel.train.config import Objective, TrainConfig
from tercel.train.features import FeatureSupply
from tercel.train.lesson import Lesson, lesson_of
from tercel.train.ttt import training_time_test
from tests.draft.heads_for_tests import some_vocabulary
from tests.tiny import VOCAB
from tests.train.worlds import chat, head_for, random_chat, target_of

DEPTH = 4
EVERY_ID = DraftVocabulary(torch.arange(4, VOCAB), VOCAB)
LENGTHS = (24, 1, 17, 2, 40, 30)  # of the answers, at most: an answer of one token has nothing to draft


@dataclass(frozen=True)
class Decoded:
    """Conversations of two turns each, and what decoding their answers with chains of the head took."""

    chats: list[TokenizedChat]
    results: list[GenerationResult]
    model: DraftModel
    supply: FeatureSupply


def talk(target, proposer, params: list[SamplingParams]) -> tuple[list[TokenizedChat], list[GenerationResult]]:
    """Random questions answered by the target, two to a conversation, the second one behind the first answer."""
    generator = torch.Generator().manual_seed(5)
    engine = Engine(target, proposer)
    chats, results = [], []
    for first in range(0, len(params), 2):
        tokens: list[int] = []
        flags: list[bool] = []
        for asked in params[first : first + 2]:
            tokens += torch.randint(4, VOCAB, (6,), generator=generator).tolist()
            (result,) = engine.generate([Request(tuple(tokens), asked)])
            flags += [False] * (len(tokens) - len(flags)) + [True] * len(result.tokens)
            tokens += result.tokens
            results.append(result)
        chats.append(chat([*tokens, 3], [*flags, False]))
    return chats, results


def lesson(**settings: Any) -> Lesson:
    return lesson_of(TrainConfig(**settings))


def decoded(temperature: float) -> Decoded:
    """A head that has half learned these very answers drafts some of their tokens right."""
    target = target_of("llama")
    params = [
        SamplingParams(max_new_tokens=n, temperature=temperature, seed=i, ignore_eos=i % 2 == 0)
        for i, n in enumerate(LENGTHS)
    ]
    head = head_for(target, EVERY_ID)
    model = DraftModel(head, EVERY_ID, HeadInfo(None))
    supply = FeatureSupply(target, head, EVERY_ID)
    chats, _ = talk(target, Eagle3(model, target, TreeShape.chain(1)), params)
    optimizer = torch.optim.AdamW(head.parameters(), lr=5e-3)
    batch, objective = supply.batch(chats), Objective(steps=DEPTH, kind="hard", decay=None)
    for _ in range(50):
        optimizer.zero_grad()
        training_time_test(head, batch, supply.to_draft, objective).loss.backward()
        optimizer.step()
    again, results = talk(target, Eagle3(model, target, TreeShape.chain(DEPTH)), params)
    assert [c.tokens.tolist() for c in again] == [c.tokens.tolist() for c in chats]
    return Decoded(chats, results, model, supply)


@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "sampled"])
def test_the_walk_makes_the_steps_of_decoding(temperature):
    world = decoded(temperature)
    head, supply = world.model.eagle3, world.supply
    batch = supply.batch(world.chats)
    result = training_time_test(head, batch, supply.to_draft, Objective(steps=DEPTH))
    walked = [chain.walk().runs.tolist() for chain in chains_of(result, batch, supply.to_draft)]
    assert walked == [list(r.accepted) for r in world.results if r.steps]
    assert {0, 1, DEPTH} < {accepted for steps in walked for accepted in steps}  # or the test would say little
    parts = (supply.batch(part) for part in (world.chats[:1], world.chats[1:]))
    got = simulate(lesson(ttt_steps=DEPTH), head, parts, supply.to_draft)
    steps = sum(r.steps for r in world.results)
    assert got.steps == steps
    assert got.tau == sum(len(r.tokens) - 1 for r in world.results) / steps
    assert got.alpha == count_alpha(world.results, DEPTH).alpha
    hard = simulate(lesson(ttt_steps=DEPTH, loss="hard"), head, [batch], supply.to_draft)
    assert (hard.tau, hard.alpha) == (got.tau, got.alpha)


@pytest.mark.parametrize("average", ["sequence", "token"])
def test_the_held_out_loss_does_not_hang_on_how_chats_are_packed(average):
    target = target_of("llama")
    vocabulary = some_vocabulary(70, 3)  # so that rows are dropped
    head = head_for(target, vocabulary)
    supply = FeatureSupply(target, head, vocabulary)
    chats = [random_chat(9 + 4 * seed, seed) for seed in range(4)]
    taught = lesson(ttt_steps=3, average=average)
    with torch.no_grad():
        whole = float(training_time_test(head, supply.batch(chats), supply.to_draft, taught.objective).loss)
    for cut in (1, 3, 4):
        parts = [supply.batch(part) for part in (chats[:cut], chats[cut:]) if part]
        assert simulate(taught, head, parts, supply.to_draft).loss == pytest.approx(whole, rel=1e-6)


def test_answers_begin_where_prefill_has_given_the_first_token():
    """By hand, of a head that always drafts one token: every draft of it is right, every other is wrong."""
    target = target_of("llama")
    head = head_for(target, EVERY_ID)
    head.lm_head.weight.data.zero_()  # argmax of equal logits is the first id, 4
    supply = FeatureSupply(target, head, EVERY_ID)
    texts = [
        chat([9, 4, 4, 4, 7, 4, 9, 9, 4, 4], [False, True, True, True, True, True, False, False, True, True]),
        chat([4, 4, 4, 4], [True] * 4),  # as plain text has it: the first row predicts the third token
        chat([9, 9, 4], [False, False, True]),  # prefill's alone
    ]
    batch = supply.batch(texts)
    result = training_time_test(head, batch, supply.to_draft, Objective(steps=3))
    chains = chains_of(result, batch, supply.to_draft)
    assert [chain.runs.tolist() for chain in chains] == [[2, 1, 0, 1], [1], [2, 1]]
    assert [chain.room.tolist() for chain in chains] == [[3, 3, 2, 1], [1], [2, 1]]
    assert [chain.walk().runs.tolist() for chain in chains] == [[2, 1], [1], [2]]
    got = simulate(lesson(ttt_steps=3), head, [batch], supply.to_draft)
    assert (got.alpha, got.tau, got.steps) == ((1.0, 2 / 2, 0 / 1), 7 / 4, 4)


def test_nothing_to_measure_is_vanilla_decoding():
    target = target_of("llama")
    head = head_for(target, EVERY_ID)
    supply = FeatureSupply(target, head, EVERY_ID)
    batch = supply.batch([chat([5, 17, 40], [False] * 3)])
    got = simulate(lesson(ttt_steps=2), head, [batch], supply.to_draft)
    assert (got.alpha, got.tau, got.steps, got.loss) == ((0.0, 0.0), 1.0, 0, 0.0)


def test_journals_and_heads_of_earlier_versions_are_read():
    row = {"alpha": [0.5, 0.25], "tau": 1.625, "rows": 800, "loss": 2.0}
    then = HeldOut.from_json(row, "eval", Path("metrics.jsonl"))
    assert then == HeldOut(alpha=(0.5, 0.25), tau=1.625, rows=800, loss=2.0)
    assert held_out_basis(then) == "joint-prefix estimate over 800 rows, some percent above decoding"
    now = HeldOut(alpha=(0.5, 0.25), tau=1.6, steps=300, loss=2.0)
    assert held_out_basis(now) == "over the 300 steps that decoding makes on those answers"
    assert HeldOut.from_json(json.loads(json.dumps(now.to_json())), "eval", Path("metrics.jsonl")) == now
