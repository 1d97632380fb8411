"""A head learns: after seconds of training it drafts better on text that it has not seen."""

from __future__ import annotations

from tercel.draft import load_head
from tercel.target_model.model import Target
from tercel.target_model.sources import Source
from tercel.train.config import TrainConfig
from tercel.train.loop import train
from tests.tiny import tiny_model, tiny_tokenizer
from tests.train.worlds import answered_chats


def test_training_raises_the_acceptance_on_held_out_answers(tmp_path):
    # small weights: the next token hangs mostly on the last one, which a head can learn in a moment
    model = tiny_model("qwen3", initializer_range=0.05)
    target = Target(model, tiny_tokenizer(), Source("qwen3", "qwen3", "folder", None))
    config = TrainConfig(
        epochs=10,
        batch_tokens=250,
        lr=5e-3,
        clip=1.0,
        ttt_steps=3,
        draft_vocab=0,
        feature_layers=(2, 4, 5),
        eval_share=0.25,
        eval_every=5,
    )
    summary = train(target, answered_chats(target, 40, answer=16), config, tmp_path / "r")
    taus = [row["eval"]["tau"] for row in summary.history if "eval" in row]
    assert summary.best.tau == max(taus)
    assert taus[-1] > taus[0] + 0.15
    losses = [row["loss"] for row in summary.history if "loss" in row]
    assert sum(losses[-5:]) < sum(losses[:5])
    head = load_head(tmp_path / "r")
    assert head.info.measured.held_out.tau == summary.best.tau
    assert head.info.target.weights == target.fingerprint
    assert f"τ = {summary.best.tau:.3f}" in (tmp_path / "r" / "README.md").read_text()
