"""Settings that experiments ask for: other shapes, other beginnings, other inputs of later steps."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch

from tercel.draft import Eagle3Head, load_head
from tercel.draft.alignment import plan_rows
from tercel.errors import TercelError
from tercel.target_model.output_layer import probe_tokens
from tercel.train.batches import supervised_counts
from tercel.train.config import FUSING, METHODS, TrainConfig
from tercel.train.features import FeatureSupply
from tercel.train.initial import first_head
from tercel.train.lesson import lesson_of
from tercel.train.ttt import roll_out, token_in, training_time_test
from tests.draft.heads_for_tests import some_vocabulary
from tests.train.test_loop import CHATS, SMALL, run, same
from tests.train.worlds import head_for, random_chat, target_of


def test_a_narrower_mlp_is_the_heads_own(tmp_path: Path) -> None:
    config = dataclasses.replace(SMALL, mlp_width=24, epochs=1)
    run(tmp_path / "r", config, stop_after=1)
    head = load_head(tmp_path / "r" / "last").head
    assert (head.config.intermediate_size, tuple(head.midlayer.mlp.up_proj.weight.shape)) == (24, (24, 32))
    again = dataclasses.replace(config, mlp_width=16, start_from=str(tmp_path / "r" / "last"))
    with pytest.raises(TercelError, match="has mlp_width 24, but this run asks for 16"):
        run(tmp_path / "again", again)


@pytest.mark.parametrize("method", METHODS)
def test_which_methods_read_several_layers(method: str) -> None:
    target = target_of("llama")
    layers = lesson_of(TrainConfig(method=method)).new_config(target, 70).feature_layers
    assert (tuple(layers) != (target.num_layers,)) is (method in FUSING)


def test_a_head_may_have_further_layers_which_learn_too(tmp_path: Path) -> None:
    config = dataclasses.replace(SMALL, head_layers=2, dropout=0.1, epochs=1)
    run(tmp_path / "a", config)
    head = load_head(tmp_path / "a" / "last", dtype=torch.float32).head
    first, _, _ = first_head(config, target_of(), CHATS, supervised_counts(CHATS, target_of().vocab_size))
    began, learned = first.layers["1"].mlp.up_proj.weight, head.layers["1"].mlp.up_proj.weight
    assert (learned - began).abs().max() > 1e-3 * began.abs().max()
    run(tmp_path / "b", config, stop_after=1)
    run(tmp_path / "b", config)
    same(tmp_path / "a", tmp_path / "b")
    again = dataclasses.replace(config, head_layers=3, start_from=str(tmp_path / "a" / "last"))
    with pytest.raises(TercelError, match="has head_layers 2, but this run asks for 3"):
        run(tmp_path / "again", again)


def test_later_steps_may_read_the_heads_own_drafts(tmp_path: Path) -> None:
    config = dataclasses.replace(SMALL, ttt_steps=3, step_inputs="drafts")
    target, vocabulary = target_of(), some_vocabulary(70, 3)
    head, lesson = head_for(target, vocabulary), lesson_of(config)
    lesson.begin(target, vocabulary)
    supply = FeatureSupply(target, head, vocabulary)
    batch, objective = supply.batch([random_chat(11, 1), random_chat(9, 2)]), config.objective
    plain = training_time_test(head, batch, supply.to_draft, objective)
    step = iter((1, 2))

    def text(output: torch.Tensor) -> torch.Tensor:
        number = next(step)
        return batch.embeddings[token_in(plain.plan.rows[number - 1], number).clamp(max=len(batch.tokens) - 1)]

    assert torch.equal(training_time_test(head, batch, supply.to_draft, objective, read=text).loss, plain.loss)
    learned = lesson.learn(head, batch, supply.to_draft)
    said = [vocabulary.ids[head.logits(output).argmax(-1)] for output in roll_out(head, batch, plain.plan)]
    assert learned.steps[0].loss == plain.steps[0].loss
    assert learned.steps[1].loss != plain.steps[1].loss
    first = iter(said)  # of step 0; what step 2 reads hangs on what step 1 read
    two = dataclasses.replace(objective, steps=2)
    short = lesson_of(dataclasses.replace(config, ttt_steps=2))
    short.begin(target, vocabulary)
    wanted = training_time_test(head, batch, supply.to_draft, two, read=lambda _: target.embed(next(first)))
    assert torch.equal(short.learn(head, batch, supply.to_draft).loss, wanted.loss)
    assert torch.equal(lesson.rehearse(head, batch, supply.to_draft).loss, plain.loss)
    one = dataclasses.replace(config, epochs=1)
    run(tmp_path / "a", one)
    run(tmp_path / "b", one, stop_after=1)
    run(tmp_path / "b", one)
    same(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize("size", [32, 24])
def test_drafts_are_read_with_the_heads_own_embeddings(size: int) -> None:
    """Of the target's width or another; they learn from what was drafted too."""
    target, vocabulary = target_of(), some_vocabulary(70, 3)
    head = head_for(target, vocabulary, own_embeddings=True, hidden_size=size)
    lesson = lesson_of(dataclasses.replace(SMALL, ttt_steps=2, step_inputs="drafts"))
    lesson.begin(target, vocabulary)
    supply = FeatureSupply(target, head, vocabulary)
    batch = supply.batch([random_chat(11, 1)])
    first = next(roll_out(head, batch, plan_rows(batch.supervised, batch.lengths, 2)))
    drafted = vocabulary.ids[head.logits(first).argmax(-1)]
    result = training_time_test(
        head, batch, supply.to_draft, lesson.objective, read=lambda _: head.embed_tokens(drafted)
    )
    learned = lesson.learn(head, batch, supply.to_draft)
    assert torch.equal(learned.loss, result.loss)
    learned.loss.backward()
    unread = torch.tensor([token for token in drafted.tolist() if token not in batch.tokens.tolist()])
    assert head.embed_tokens.weight.grad[unread].abs().sum() > 0


def begun(arch: str, **more: object) -> Eagle3Head:
    target = target_of(arch)
    config = dataclasses.replace(SMALL, layer_start="target", **more)
    head, _, _ = first_head(config, target, CHATS, supervised_counts(CHATS, target.vocab_size))
    assert isinstance(head, Eagle3Head)
    return head


@torch.no_grad()
def test_a_head_may_begin_as_its_targets_last_layer() -> None:
    head, target = begun("llama"), target_of()
    last, own = target.stock.layers[-1], head.midlayer
    assert torch.equal(own.mlp.down_proj.weight, last.mlp.down_proj.weight)
    assert torch.equal(own.self_attn.o_proj.weight, last.self_attn.o_proj.weight)
    torch.testing.assert_close(own.hidden_norm.weight, last.input_layernorm.weight, rtol=1e-4, atol=1e-4)
    hidden = torch.randn(3, 32)
    nothing = torch.zeros_like(hidden)  # an embedding that says nothing leaves the target's own queries
    normed = own.hidden_norm(hidden)
    queries = own.self_attn.q_proj(torch.cat([own.input_layernorm(nothing), normed], -1))
    torch.testing.assert_close(queries, last.self_attn.q_proj(last.input_layernorm(hidden)), rtol=1e-3, atol=1e-3)
    layer = len(target.stock.layers) - 1
    entering = target.encode(probe_tokens(target.stock.model), (layer,)).layers[0]
    supply = FeatureSupply(target, head, some_vocabulary(70, 3))
    fused = head.fuse(supply.batch(CHATS).features)
    sizes = [x.pow(2).mean(-1).sqrt().median().item() for x in (fused, entering)]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.3)
    with pytest.raises(TercelError, match="other parts than a head's"):
        begun("qwen2")
    with pytest.raises(TercelError, match=r"mlp.gate_proj of the target's .* is \[64, 32\].*leave out layer_start"):
        begun("llama", mlp_width=24)


def test_the_rate_falls_as_it_is_told() -> None:
    told = {"lr": 1.0, "warmup": 0.1, "final_lr": 0.1}
    linear = [TrainConfig(**told, schedule="linear").learning_rate(step, 100) for step in range(100)]
    assert linear[55] == pytest.approx(0.55)
    assert [a - b for a, b in itertools.pairwise(linear[10:])] == pytest.approx([0.01] * 89)
    held = [TrainConfig(**told, schedule="hold").learning_rate(step, 100) for step in range(100)]
    assert held[10:82] == pytest.approx([1.0] * 72)
    assert held[91] == pytest.approx(0.55)
    twice = [TrainConfig(**told, cycles=2).learning_rate(step, 100) for step in range(100)]
    once = [TrainConfig(**told).learning_rate(step, 100) for step in range(100)]
    assert twice[10:55] == pytest.approx(once[10::2])
    assert twice[55:] == pytest.approx(twice[10:55])
