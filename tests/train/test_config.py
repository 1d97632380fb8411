"""Settings that cannot work, and the learning rate."""

from __future__ import annotations

from dataclasses import fields

import pytest

from tercel.errors import TercelError
from tercel.train.config import TrainConfig


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"epochs": 0}, "epochs must be at least 1, not 0"),
        ({"max_length": 0}, "max_length must be at least 1"),
        ({"loss": "smooth"}, "loss must be one of soft, hard, lk, not 'smooth'"),
        ({"oov": ""}, "oov must be one of drop, keep"),
        ({"average": "batch"}, "average must be one of sequence, token"),
        ({"eval_share": 1.0}, "eval_share must lie between 0 and 1"),
        ({"lr": 0.0}, "lr must be positive"),
        ({"lr": float("nan")}, "lr must be positive"),
        ({"clip": -1.0}, "clip must be positive"),
        ({"warmup": 2.0}, "warmup must lie between 0 and 1"),
        ({"decay": -0.1}, "decay must lie between 0 and 1"),
        ({"seed": 2**64}, r"seed must lie between 0 and 2..40 - 1"),
        ({"draft_vocab": -5}, "draft_vocab must be at least 0, not -5"),
        ({"ttt_steps": 2**64}, "ttt_steps must be at most 64, not 18446744073709551616"),
        ({"ttt_steps": 10**4000}, r"ttt_steps must be at most 64, not 10{78}…$"),
        ({"lr": 1e39}, "lr must be positive and at most 1000, not 1e.39"),
        ({"weight_decay": float("nan")}, "weight_decay must be at least 0, not nan"),
        ({"method": "medusa", "part_layers": 17}, "part_layers must be at most 16, not 17"),
        ({"part_layers": 2}, "part_layers is a setting of medusa and hydra; leave it out with the method eagle3"),
        ({"method": "eagle", "feature_loss": 1.0}, "feature_loss is a setting of eagle3; leave it out"),
        ({"method": "mtp", "fc_norm": True}, "fc_norm is a setting of eagle3 and p-eagle; leave it out"),
        ({"method": "hydra", "feature_layers": (2,)}, "feature_layers is a setting of eagle3 and p-eagle; leave"),
        ({"layer_start": "target", "start_from": "head"}, "layer_start does not go with start_from, which has a layer"),
        ({"layer_start": "target", "target_sharding": "fsdp"}, "layer_start does not go with target_sharding, which"),
        ({"method": "hass", "freeze_lm_head": True}, "freeze_lm_head is a setting of eagle3 and medusa and hydra"),
    ],
)
def test_impossible_settings(wrong, words):
    with pytest.raises(TercelError, match=words):
        TrainConfig(**wrong)


def test_no_number_is_without_a_bound():
    """Of those that size something none fills the machine, and of those that weights are multiplied with none is more
    than float32 can hold."""
    numbers = [f.name for f in fields(TrainConfig) if type(f.default) in (int, float)]
    assert len(numbers) == 26
    for name in (*numbers, "lr", "warmup"):  # the last two are left out by default
        for value in (2**64 if name != "clip" else 1e31, 1e39, float("inf"), float("nan")):
            with pytest.raises(TercelError, match=f"^{name} must "):
                TrainConfig(**{name: value})


def test_learning_rate_warms_up_and_falls():
    config = TrainConfig(lr=1.0, warmup=0.1, final_lr=0.1)
    rates = [config.learning_rate(step, 100) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert rates[10] == pytest.approx(1.0)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[55] == pytest.approx(0.55)
    assert 0.1 < rates[99] < 0.11
    assert config.learning_rate(0, 1) == 1.0


def test_a_head_that_has_learned_starts_more_gently_unless_told_otherwise():
    new, again = TrainConfig(), TrainConfig(start_from="head")
    assert (new.peak_lr, new.warmup_share) == (5e-4, 0.04)
    assert max(again.learning_rate(step, 1000) for step in range(1000)) < 0.5 * new.peak_lr
    assert all(again.learning_rate(step, 1000) < new.learning_rate(step, 1000) / 2 for step in range(100))
    told = TrainConfig(start_from="head", lr=1e-3, warmup=0.0)
    assert told.learning_rate(0, 1000) == 1e-3
    assert (told.values()["lr"], again.values()["warmup"]) == (1e-3, again.warmup_share)


def test_a_run_of_an_earlier_version_goes_on_under_the_same_key():
    """Its settings had rates in place of nothing, and no patience."""
    assert TrainConfig().digest("d", "t") == "744b986072f5afe0"
    assert TrainConfig(lr=5e-4, warmup=0.04).digest("d", "t") == TrainConfig().digest("d", "t")


def test_the_key_changes_with_what_is_learned_only():
    base = TrainConfig().digest("d", "t")
    assert TrainConfig(eval_every=7, patience=2, save_every=3).digest("d", "t") == base
    others = {
        TrainConfig(lr=1e-4).digest("d", "t"),
        TrainConfig().digest("e", "t"),
        TrainConfig().digest("d", "u"),
    }
    assert len(others | {base}) == 4


def test_the_papers_formula_and_the_default():
    assert [TrainConfig(decay=0.5).objective.step_weight(s) for s in range(3)] == [1, 0.5, 0.25]
    assert TrainConfig(decay=0.0, ttt_steps=4).objective.step_weight(3) == 0.25
