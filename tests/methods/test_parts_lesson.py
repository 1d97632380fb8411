"""Medusa's and Hydra's objectives against a plain form of them, and heads that learn by them in the one trainer."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tercel.decode.engine import Engine
from tercel.decode.proposers import make_proposer
from tercel.decode.sampling import SamplingParams
from tercel.decode.types import Request
from tercel.decode.vanilla import Vanilla
from tercel.draft import load_head, save_head
from tercel.draft.shape import TreeShape
from tercel.errors import TercelError
from tercel.methods.last_hidden import LastHiddenHead
from tercel.methods.parts_lesson import parts_loss
from tercel.target_model.model import Target
from tercel.target_model.sources import Source
from tercel.train.acceptance import simulate
from tercel.train.config import Objective, TrainConfig
from tercel.train.features import FeatureSupply
from tercel.train.goals import Batch, Extent, TTTResult
from tercel.train.initial import first_head
from tercel.train.lesson import lesson_of
from tercel.train.loop import train
from tests.methods.heads import CONFIGS, random_parts
from tests.tiny import tiny_model, tiny_tokenizer
from tests.train.worlds import answered_chats, chat, random_chat, target_of

CHATS = [
    random_chat(11, 1),
    chat([5, 6, 7, 8], [False, False, False, True]),  # one row only
    random_chat(8, 2),
    chat([9, 10, 11, 12, 13], [True] * 5),  # supervised from the start
]


def naive(
    head: LastHiddenHead, batch: Batch, to_draft: Tensor, objective: Objective
) -> tuple[float, dict[str, Tensor]]:
    """The loss and its gradients by parameter, row by row in float64."""
    weights, head = head.state_dict(), type(head)(head.config).double()
    head.load_state_dict(weights)
    starts = [sum(batch.lengths[:i]) for i in range(len(batch.lengths) + 1)]
    total = torch.zeros((), dtype=torch.float64)
    assert batch.embeddings is not None
    for step in range(objective.steps):
        by_sequence: list[list[Tensor]] = []
        for start, end in itertools.pairwise(starts):
            lost = []
            for row in range(start, end):
                said = range(row + 2, row + 3 + step)  # the tokens of a chain begun here, up to this part's
                if said[-1] >= end or not all(bool(batch.supervised[i]) for i in said):
                    continue
                hidden = batch.features[row].double()
                read = torch.stack([batch.embeddings[row + 1 + j].double() for j in range(step + 1)])
                log_q = torch.log_softmax(head.logits(step, head.output(step, hidden, read)), -1)
                teacher = int(batch.taught[said[-1] - 1])
                label = int(batch.teacher.best[teacher])
                if objective.kind == "hard":
                    label = int(to_draft[batch.tokens[said[-1]]])
                if label < 0:
                    continue
                p = F.one_hot(torch.tensor(label), len(log_q)).double()
                if objective.kind == "soft":
                    p = batch.teacher.probs[teacher].double()
                lost.append(-(p * log_q).sum())
            by_sequence.append(lost)
        if objective.average == "token":
            rows = [one for lost in by_sequence for one in lost]
            mean = sum(rows) / max(len(rows), 1)
        else:
            mean = sum(sum(lost) / max(len(lost), 1) for lost in by_sequence) / len(by_sequence)
        total = total + objective.step_weight(step) * mean
    total.backward()
    return float(total.detach()), {name: p.grad for name, p in head.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("settings", "objective"),
    [
        ({}, Objective(steps=4, kind="hard")),
        ({"num_layers": 2, "shared_output": True}, Objective(steps=4, kind="hard", average="token")),
        ({}, Objective(steps=3, kind="soft", average="token")),
        ({"num_layers": 2, "shared_output": True}, Objective(steps=4, kind="soft", decay=None)),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", CONFIGS)
def test_loss_and_gradients_equal_the_plain_ones(kind: str, settings: dict[str, Any], objective: Objective) -> None:
    target = target_of("llama")
    model = random_parts(kind, target, **settings)
    head = model.head.requires_grad_(True)
    assert isinstance(head, LastHiddenHead)
    supply = FeatureSupply(target, head, model.vocabulary)
    batch = supply.batch(CHATS)
    result = parts_loss(head, batch, supply.to_draft, objective)
    result.loss.backward()
    loss, gradients = naive(head, batch, supply.to_draft, objective)
    assert float(result.loss.detach()) == pytest.approx(loss, rel=1e-5)
    found = {name: p.grad for name, p in head.named_parameters() if p.grad is not None and bool(p.grad.any())}
    assert set(found) == {name for name, grad in gradients.items() if bool(grad.any())}
    assert len(found) > 4
    for name, grad in found.items():
        torch.testing.assert_close(grad.double(), gradients[name], rtol=1e-3, atol=1e-6)
    whole = Extent.of(batch, supply.to_draft, objective)  # cut in two, it teaches the same
    parts = [parts_loss(head, supply.batch(own), supply.to_draft, objective, whole=whole) for own in halves()]
    assert sum(float(part.loss.detach()) for part in parts) == pytest.approx(loss, rel=1e-5)


def halves() -> list[list[Any]]:
    return [CHATS[:2], CHATS[2:]]


def test_distillation_is_a_loss_of_its_own() -> None:
    kinds = {loss: lesson_of(TrainConfig(method="hydra", loss=loss)).objective.kind for loss in (None, "soft", "hard")}
    assert kinds == {None: "hard", "soft": "soft", "hard": "hard"}
    assert TrainConfig().objective.kind == "soft"
    keys = [TrainConfig(loss=loss).digest("data", "target") for loss in (None, "soft")]
    assert keys[0] == keys[1]  # a run is known by what is meant


@pytest.mark.parametrize("kind", CONFIGS)
def test_what_a_step_learned_and_what_it_would_draft(kind: str) -> None:
    target = target_of("llama")
    model = random_parts(kind, target)
    config = TrainConfig(method=kind, ttt_steps=6)  # two more than the head has parts
    lesson, supply = lesson_of(config), FeatureSupply(target, model.head, model.vocabulary)
    batch = supply.batch(CHATS)
    learned, rehearsed = (how(model.head, batch, supply.to_draft) for how in (lesson.learn, lesson.rehearse))
    assert len(learned.steps) == len(rehearsed.steps) == 4
    assert torch.equal(learned.loss, rehearsed.loss)
    assert drafts_of(learned)[0].tolist() == drafts_of(rehearsed)[0].tolist()
    assert all(bool((drafts >= 0).all()) for drafts in drafts_of(rehearsed))
    assert all(bool((drafts == -1).all()) for drafts in drafts_of(learned)[1:])  # nobody asked for them


def drafts_of(result: TTTResult) -> list[Tensor]:
    return [step.drafts for step in result.steps]


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("medusa", {}), ("hydra", {"part_layers": 2, "shared_output": True})],
    ids=("medusa", "hydra"),
)
def test_a_head_learns_and_drafts(kind: str, settings: dict[str, Any], tmp_path: Path) -> None:
    # small weights: the next token hangs mostly on the last one, which a head can learn in a moment
    model = tiny_model("qwen3", initializer_range=0.05, num_hidden_layers=2)
    target = Target(model, tiny_tokenizer(), Source("qwen3", "qwen3", "folder", None))
    pace = {"epochs": 20, "batch_tokens": 250, "lr": 2e-2, "clip": 1.0, "eval_every": 20}
    config = TrainConfig(method=kind, ttt_steps=3, draft_vocab=0, eval_share=0.1, **pace, **settings)
    chats = answered_chats(target, 20, answer=16)
    summary = train(target, chats, config, tmp_path / "r")
    losses = [row["loss"] for row in summary.history if "loss" in row]
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])
    head = load_head(tmp_path / "r")
    assert head.head.config.kind == kind
    assert head.info.training.recipe is not None
    assert head.info.training.recipe.loss == "hard"  # what its paper has, if nothing is said

    supply = FeatureSupply(target, head.head, head.vocabulary)
    held_out = simulate(lesson_of(config), head.head, [supply.batch(chats)], supply.to_draft)
    greedy = SamplingParams(max_new_tokens=16, ignore_eos=True)
    asked = [Request(tuple(c.tokens[:5].tolist()), greedy) for c in chats]
    chain = make_proposer(kind, target, head=head, shape=TreeShape.chain(3))
    results = Engine(target, chain, slots=4).generate(asked)
    assert [result.tokens for result in results] == [tuple(c.tokens[5:].tolist()) for c in chats]  # vanilla's
    assert held_out.tau > 1.5
    tau = sum(len(result.tokens) - 1 for result in results) / sum(result.steps for result in results)
    assert tau == pytest.approx(held_out.tau)  # training foretells what chains reach
    tree = Engine(target, make_proposer(kind, target, head=head, shape=TreeShape(3, 3, 12)), slots=4).generate(asked)
    assert sum(result.steps for result in tree) < sum(result.steps for result in results)

    drawn = [Request((5, 6, 7), SamplingParams(temperature=1.0, max_new_tokens=20, seed=seed)) for seed in range(3)]
    plain = Engine(target, Vanilla(), slots=2).generate(drawn)
    drafted = Engine(target, make_proposer(kind, target, head=head, shape=TreeShape(3, 3, 12)), slots=2).generate(drawn)
    assert [result.tokens for result in drafted] == [result.tokens for result in plain]


@pytest.mark.parametrize("asked", [{"part_layers": 2}, {"shared_output": True}], ids=str)
def test_a_head_to_go_on_with_is_what_the_run_asks_for(asked: dict[str, Any], tmp_path: Path) -> None:
    target = target_of("llama")
    save_head(random_parts("medusa", target), tmp_path / "head")
    config, counts = TrainConfig(method="medusa", start_from=str(tmp_path / "head")), torch.ones(target.vocab_size)
    assert isinstance(first_head(config, target, CHATS, counts)[0], LastHiddenHead)
    (name, value), *_ = asked.items()
    with pytest.raises(TercelError, match=f"has {name} (1|False), but this run asks for {value}"):
        first_head(replace(config, **asked), target, CHATS, counts)


def test_an_output_layer_that_is_kept() -> None:
    target = target_of("llama")
    for shared in (False, True):
        lesson = lesson_of(TrainConfig(method="medusa", ttt_steps=2, shared_output=shared, freeze_lm_head=True))
        head = random_parts("medusa", target, num_parts=2, shared_output=shared).head.requires_grad_(True)
        lesson.freeze(head)
        frozen = {name for name, p in head.named_parameters() if not p.requires_grad}
        assert frozen == ({"lm_head.weight"} if shared else {"medusa_heads.0.1.weight", "medusa_heads.1.1.weight"})
