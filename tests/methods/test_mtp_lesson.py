"""MTP heads learn what the papers' formulas say, from the target's last layer or from a checkpoint's modules."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tercel.decode.engine import Engine
from tercel.decode.proposers import MTP, make_proposer
from tercel.decode.sampling import SamplingParams
from tercel.decode.types import Request
from tercel.decode.vanilla import Vanilla
from tercel.draft import load_head
from tercel.draft.binding import bind
from tercel.draft.shape import TreeShape
from tercel.errors import TercelError
from tercel.methods.mtp.lesson import MtpLesson
from tercel.methods.mtp.read import read_mtp
from tercel.target_model.model import Target
from tercel.target_model.sources import Source
from tercel.train.config import TrainConfig
from tercel.train.features import FeatureSupply
from tercel.train.initial import first_head
from tercel.train.loop import train
from tests.methods.mtp_worlds import Checkpoints
from tests.methods.naive_mtp import NaiveMtp
from tests.tiny import tiny_model, tiny_tokenizer
from tests.train.worlds import answered_chats, chat, random_chat

STEPS = 4


@pytest.mark.parametrize(("arch", "modules"), [("deepseek_v3", 1), ("glm4_moe", 3)])
def test_a_rehearsal_drafts_what_the_modules_would(checkpoints: Checkpoints, arch: str, modules: int) -> None:
    path = checkpoints(arch, modules)
    target, naive = Target.load(str(path)), NaiveMtp(path, arch, modules)
    model, lesson = read_mtp(target), MtpLesson(TrainConfig(method=MTP, ttt_steps=STEPS))
    lesson.begin(target, model.vocabulary)
    chats = [random_chat(24, 1), random_chat(15, 2)]
    supply = FeatureSupply(target, model.head, model.vocabulary)
    batch = supply.batch(chats)
    result = lesson.rehearse(model.head, batch, supply.to_draft)
    compared, starts = 0, [0, len(chats[0])]
    for step, outcome in enumerate(result.steps):
        for row, draft in list(zip(result.plan.rows[step].tolist(), outcome.drafts.tolist(), strict=True))[::3]:
            start = max(at for at in starts if at <= row)
            tokens = batch.tokens.tolist()
            scores = naive.scores(tokens[start : row + 2], tokens[row + 2 : row + 2 + step])
            assert scores[draft] >= scores.max() - 1e-3, (step, row)
            compared += 1
    assert compared > 15


def test_the_gradient_is_that_of_the_loss(checkpoints: Checkpoints) -> None:
    """Against finite differences, in a direction at random, through all modules and repeated steps."""
    target = Target.load(str(checkpoints("deepseek_v3", 2)))
    model, lesson = read_mtp(target), MtpLesson(TrainConfig(method=MTP, ttt_steps=STEPS, oov="keep"))
    head = model.head.double()
    lesson.begin(target, model.vocabulary)
    supply = FeatureSupply(target, head, model.vocabulary)
    batch = supply.batch([random_chat(20, 3)])
    lesson.freeze(head)
    learning = [p for p in head.parameters() if p.requires_grad]
    generator = torch.Generator().manual_seed(0)
    way = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in learning]

    def loss() -> torch.Tensor:
        wide = {name: getattr(batch, name).double() for name in ("features", "embeddings")}
        return lesson.learn(head, type(batch)(**{**vars(batch), **wide}), supply.to_draft).loss

    lesson._rows = lesson._rows.double()
    loss().backward()
    slope = sum(float((p.grad * d).sum()) for p, d in zip(learning, way, strict=True) if p.grad is not None)
    values = []
    for size in (1e-4, -1e-4):
        with torch.no_grad():
            for p, d in zip(learning, way, strict=True):
                p.add_(size * d)
            values.append(float(loss()))
            for p, d in zip(learning, way, strict=True):
                p.sub_(size * d)
    assert slope == pytest.approx((values[0] - values[1]) / 2e-4, rel=1e-2)


def small_target() -> Target:
    """Its next token hangs mostly on the last one, which a head can learn in a moment."""
    model = tiny_model("qwen3", initializer_range=0.05)
    return Target(model, tiny_tokenizer(), Source("qwen3", "qwen3", "folder", None))


def test_training_raises_the_acceptance_and_the_head_drafts(tmp_path: Path) -> None:
    target = small_target()
    config = TrainConfig(
        method=MTP, epochs=5, batch_tokens=250, lr=3e-3, clip=1.0, ttt_steps=3, draft_vocab=100, eval_share=0.25,
        eval_every=5,
    )  # fmt: skip
    chats = answered_chats(target, 60, answer=16)
    summary = train(target, chats, config, tmp_path / "r")
    taus = [row["eval"]["tau"] for row in summary.history if "eval" in row]
    assert taus[-1] > taus[0] + 0.1
    model = bind(load_head(tmp_path / "r"), target)
    asked = [Request((9, 10, 11), SamplingParams(max_new_tokens=12, ignore_eos=True))]
    drafted = Engine(target, make_proposer(MTP, target, head=model, shape=TreeShape(3, 3, 8))).generate(asked)[0]
    assert drafted.tokens == Engine(target, Vanilla()).generate(asked)[0].tokens
    assert sum(drafted.accepted) > 0


def test_a_run_begins_with_the_modules_that_the_target_has(checkpoints: Checkpoints) -> None:
    target = Target.load(str(checkpoints("deepseek_v3")))
    counts = torch.ones(target.vocab_size)
    config = TrainConfig(method=MTP, draft_vocab=64)
    head, vocabulary, _ = first_head(config, target, [chat([5, 6, 7], [False, True, True])], counts)
    stored = read_mtp(target).head.state_dict()
    assert all(torch.equal(tensor, stored[name]) for name, tensor in head.state_dict().items())
    assert len(vocabulary) == 64
    learning = {name for name, parameter in head.named_parameters() if parameter.requires_grad}
    assert learning == {name for name in stored if "correction_bias" not in name}


def test_a_run_without_the_targets_layers_is_told() -> None:
    target = small_target()
    target.drop_blocks()
    with pytest.raises(TercelError, match="begins with the last layer of qwen3, which is not loaded"):
        first_head(TrainConfig(method=MTP), target, [], torch.ones(target.vocab_size))
