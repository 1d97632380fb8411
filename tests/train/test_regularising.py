"""What keeps a head from learning its data by heart: prompts that count, dropout, noise, a mean of
the weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from tercel.draft import load_head
from tercel.errors import TercelError
from tercel.train import chance
from tercel.train.acceptance import simulate
from tercel.train.batches import split, supervised_counts, usable
from tercel.train.config import Objective
from tercel.train.feature_store import FeatureStore
from tercel.train.features import FeatureSupply
from tercel.train.goals import Extent, row_goals
from tercel.train.learner import Learner
from tercel.train.lesson import lesson_of
from tercel.train.optimizer import PACE, HeadOptimizer
from tercel.train.run_folder import RunFolder
from tercel.train.ttt import training_time_test
from tests.draft.heads_for_tests import some_vocabulary
from tests.train.test_feature_store import BF16, made
from tests.train.test_loop import CHATS, SMALL, run, same
from tests.train.worlds import chat, head_for, random_chat, target_of


@pytest.mark.parametrize("objective", [Objective(steps=3), Objective(steps=3, kind="hard", average="token")])
def test_prompts_that_count_in_full_are_answers(objective: Objective) -> None:
    target, vocabulary = target_of(), some_vocabulary(70, 3)
    head = head_for(target, vocabulary)
    chats = [random_chat(11, 1), random_chat(8, 2)]
    supply = FeatureSupply(target, head, vocabulary, prompt_weight=1.0)
    plain = FeatureSupply(target, head, vocabulary)
    learned = training_time_test(head, supply.batch(chats), supply.to_draft, objective)
    wanted = training_time_test(head, plain.batch([one.whole() for one in chats]), plain.to_draft, objective)
    assert torch.equal(learned.loss, wanted.loss)
    assert not torch.equal(learned.loss, training_time_test(head, plain.batch(chats), plain.to_draft, objective).loss)


@pytest.mark.parametrize("average", ["sequence", "token"])
def test_a_prompts_row_weighs_its_share_of_an_answers(average: str) -> None:
    target, vocabulary = target_of(), some_vocabulary(128, 3)
    head, one = head_for(target, vocabulary), chat([5, 6, 7, 8, 9, 10], [False] * 3 + [True] * 3)
    supply = FeatureSupply(target, head, vocabulary, prompt_weight=0.25)
    batch, objective = supply.batch([one]), Objective(steps=2, average=average, decay=1.0)
    plan = training_time_test(head, batch, supply.to_draft, objective).plan
    goals = [row_goals(batch, supply.to_draft, objective, plan, step) for step in range(2)]
    # rows predict tokens 2 (the prompt's) to 5, then 3 to 5
    assert goals[0].weights.tolist() == pytest.approx([x / 3.25 for x in (0.25, 1, 1, 1)])
    assert goals[1].weights.tolist() == pytest.approx([1 / 3] * 3)
    assert Extent.of(batch, supply.to_draft, objective).rows == (3.25, 3.0)


def test_what_is_drafted_and_what_is_held_out_stay_answers(tmp_path: Path) -> None:
    target, config = target_of(), dataclasses.replace(SMALL, prompt_weight=0.5, epochs=1)
    summary = run(tmp_path / "r", config)
    model = load_head(tmp_path / "r")
    held_out = split(usable(CHATS, config.max_length, target.vocab_size), config.eval_share).held_out
    supply = FeatureSupply(target, model.head, model.vocabulary)
    again = simulate(lesson_of(config), model.head, [supply.batch(held_out)], supply.to_draft)
    assert again.steps == summary.best.steps
    assert again.loss == pytest.approx(summary.best.loss, rel=0.01)  # the file is in bfloat16
    train = split(usable(CHATS, config.max_length, target.vocab_size), config.eval_share).train
    assert model.info.training.supervised_tokens == int(supervised_counts(train, target.vocab_size).sum())


def test_features_of_all_tokens_serve_runs_with_and_without_prompts(tmp_path: Path) -> None:
    config = dataclasses.replace(SMALL, epochs=1)
    with_prompts = dataclasses.replace(config, prompt_weight=0.5)
    made(tmp_path / "answers")
    with pytest.raises(TercelError, match=r"lacks the features of all tokens of 14 of .* with --all-tokens, the same"):
        run(tmp_path / "r", with_prompts, dtype=BF16, features=tmp_path / "answers")
    made(tmp_path / "all", all_tokens=True)
    answers, everything = FeatureStore(tmp_path / "answers"), FeatureStore(tmp_path / "all")
    for one in [*CHATS, chat(CHATS[0].tokens.tolist(), [True] * len(CHATS[0]))]:
        read = everything.read(one, BF16)
        assert len(read.hidden) == int(one.supervised[1:].sum())
        if one in answers:
            torch.testing.assert_close(read.hidden, answers.read(one, BF16).hidden, rtol=0.05, atol=0.05)
    run(tmp_path / "a", config, dtype=BF16, features=tmp_path / "all")
    run(tmp_path / "b", with_prompts, dtype=BF16, features=tmp_path / "all", stop_after=1)
    run(tmp_path / "b", with_prompts, dtype=BF16, features=tmp_path / "all")
    run(tmp_path / "c", with_prompts, dtype=BF16, features=tmp_path / "all")
    same(tmp_path / "b", tmp_path / "c")


def test_noise_is_as_large_as_a_layer_lets_it_be() -> None:
    features = torch.cat([torch.randn(50, 32), 100 * torch.randn(50, 32)], -1)
    moved = chance.noised(features, 2, 0.2, chance.generator_of(3, features.device)) - features
    for layer, own in zip(moved.chunk(2, -1), features.chunk(2, -1), strict=True):
        share = layer.abs().amax(-1) / own.pow(2).mean(-1).sqrt()
        assert share.max() <= 0.2 * 1.001
        assert share.mean() > 0.15
    again = chance.noised(features, 2, 0.2, chance.generator_of(3, features.device)) - features
    assert torch.equal(moved, again)


def zeros_in(numbers: torch.Tensor) -> float:
    return float((numbers == 0).float().mean())


def test_dropout_is_of_three_places_and_of_learning_alone() -> None:
    target, vocabulary = target_of(), some_vocabulary(70, 3)
    head = head_for(target, vocabulary)
    found: list[tuple[str, float]] = []
    parts = {"fc": head.fc, "attention": head.midlayer.self_attn.o_proj, "mlp": head.midlayer.mlp}
    with chance.dropping(head, 0.25, chance.generator_of(1, head.device)):
        for name, module in parts.items():  # told after the dropping, which was registered first
            module.register_forward_hook(lambda _, __, out, name=name: found.append((name, zeros_in(out))))
        supply = FeatureSupply(target, head, vocabulary)
        batch = supply.batch([random_chat(40, seed) for seed in range(4)])
        dropped = training_time_test(head, batch, supply.to_draft, Objective(steps=2)).loss
    assert {name for name, _ in found} == set(parts)
    assert all(0.15 < zeros < 0.35 for _, zeros in found)
    plain = training_time_test(head, batch, supply.to_draft, Objective(steps=2)).loss
    assert not torch.equal(dropped, plain)
    for settings in ({"dropout": 0.25}, {"feature_noise": 0.5}):
        lesson = lesson_of(dataclasses.replace(SMALL, **settings))
        seeded = [dataclasses.replace(batch, seed=seed) for seed in (1, 2, 1)]
        losses = [float(lesson.learn(head, one, supply.to_draft).loss.detach()) for one in seeded]
        assert losses[0] == losses[2] != losses[1]
        rehearsed = [float(lesson.rehearse(head, one, supply.to_draft).loss.detach()) for one in seeded]
        assert len(set(rehearsed)) == 1


def test_the_mean_of_the_weights_is_what_is_measured_and_saved(tmp_path: Path) -> None:
    config = dataclasses.replace(SMALL, ema=0.5, epochs=1)
    target = target_of()
    weights: list[torch.Tensor] = []  # before the first step, and after each
    update = Learner.update

    def noted(self: Learner, rate: float) -> None:
        if not weights:
            weights.append(self.weights.master.fc.weight.detach().clone())
        update(self, rate)
        weights.append(self.weights.master.fc.weight.detach().clone())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learner, "update", noted)
        summary = run(tmp_path / "r", config)
    mean = weights[0]
    for step, own in enumerate(weights[1:], 1):
        decay = min(0.5, (1 + step) / (10 + step))
        mean = decay * mean + (1 - decay) * own
    last = load_head(tmp_path / "r" / "last")
    torch.testing.assert_close(last.head.fc.weight, mean.to(torch.bfloat16).float())
    assert not torch.allclose(last.head.fc.weight, weights[-1], rtol=1e-2, atol=1e-4)
    held_out = split(usable(CHATS, config.max_length, target.vocab_size), config.eval_share).held_out
    best = load_head(tmp_path / "r")
    supply = FeatureSupply(target, best.head, best.vocabulary)
    again = simulate(lesson_of(config), best.head, [supply.batch(held_out)], supply.to_draft)
    assert again.loss == pytest.approx(summary.best.loss, rel=0.01)


def test_a_run_with_all_of_it_goes_on_bit_for_bit(tmp_path: Path) -> None:
    config = dataclasses.replace(SMALL, epochs=1, prompt_weight=0.5, dropout=0.2, feature_noise=0.1, ema=0.9)
    config = dataclasses.replace(config, optimizer="muon", weight_decay=0.1, average="token")
    run(tmp_path / "whole", config, dtype=BF16)
    run(tmp_path / "parts", config, dtype=BF16, stop_after=1)
    run(tmp_path / "parts", config, dtype=BF16)
    same(tmp_path / "whole", tmp_path / "parts")
    states = [torch.load(RunFolder(tmp_path / name).state, weights_only=True) for name in ("whole", "parts")]
    for name, mean in states[0]["mean"].items():
        assert torch.equal(mean, states[1]["mean"][name])


def test_weight_decay_shrinks_what_muon_steps() -> None:
    heads = [head_for(target_of(), some_vocabulary(70, 3)) for _ in range(2)]
    before = heads[0].fc.weight.detach().clone()
    for head, decay in zip(heads, (0.0, 0.5), strict=True):
        for parameter in head.parameters():
            parameter.grad = torch.ones_like(parameter)
        HeadOptimizer(head, "muon", decay).step(0.1)
    shrunk = heads[0].fc.weight - heads[1].fc.weight
    torch.testing.assert_close(shrunk, before * 0.1 * PACE * 0.5, rtol=1e-4, atol=1e-6)
