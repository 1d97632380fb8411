"""Heads for targets of other architectures: their sizes, a run of two steps, and decoding up to the last position."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tercel.decode.compat import load_draft
from tercel.decode.eagle3 import Eagle3
from tercel.decode.engine import Engine
from tercel.decode.sampling import SamplingParams
from tercel.decode.types import Request
from tercel.decode.vanilla import Vanilla
from tercel.draft import HeadConfig
from tercel.draft.shape import TreeShape
from tercel.errors import TercelError
from tercel.target_model.model import Target
from tercel.target_model.sources import Source
from tercel.train.config import TrainConfig
from tercel.train.loop import train
from tests.tiny import OTHER_ARCHS, save_tiny, tiny_config, tiny_model, tiny_tokenizer
from tests.train.worlds import random_chat

LIMITS = {
    arch: {"n_positions" if arch.startswith("gpt") and arch != "gpt_oss" else "max_position_embeddings": 40}
    for arch in OTHER_ARCHS
}


@pytest.mark.parametrize("arch", OTHER_ARCHS)
def test_two_steps_of_training_and_decoding_to_the_last_position(tmp_path: Path, arch: str):
    target = Target.load(str(save_tiny(tmp_path, arch, num_hidden_layers=4, **LIMITS[arch])))
    assert target.context_length == 40
    chats = [random_chat(38 + seed % 5, seed) for seed in range(8)]  # some are longer than the context
    config = TrainConfig(max_steps=2, batch_tokens=80, ttt_steps=2, draft_vocab=64, eval_share=0.3, eval_every=2)
    summary = train(target, chats, config, tmp_path / "out")
    assert summary.steps == 2
    draft = load_draft(str(tmp_path / "out"), target)
    asked = [
        Request(tuple(range(5, 5 + n)), SamplingParams(max_new_tokens=99, ignore_eos=True)) for n in (4, 30, 38, 39)
    ]
    truth = Engine(target, Vanilla(), slots=4).generate(asked)
    assert [len(r.tokens) for r in truth] == [36, 10, 2, 1]
    for shape in (TreeShape(4, 6, 24), TreeShape.chain(6)):
        drafted = Engine(target, Eagle3(draft, target, shape), slots=3).generate(asked)
        assert [r.tokens for r in drafted] == [r.tokens for r in truth]


def head_of(arch: str, **settings) -> HeadConfig:
    return HeadConfig.for_target(
        tiny_config(arch, **settings),
        feature_layers=(1,),
        vocab_size=128,
        draft_vocab_size=128,
        max_position_embeddings=256,
    )


@pytest.mark.parametrize(
    ("arch", "settings", "width"),
    [
        ("llama", {}, 64),
        ("opt", {}, 64),
        ("gpt2", {}, 128),  # names none: four times the hidden size
        ("gpt2", {"n_inner": 80}, 80),
        ("falcon", {"ffn_hidden_size": 96}, 96),
        ("mixtral", {}, 128),  # 64 is an expert's
        ("gpt_oss", {}, 128),
        ("qwen3_moe", {}, 64),  # that of its dense layers; experts have 48
    ],
)
def test_the_width_of_a_dense_mlp(arch: str, settings: dict, width: int):
    assert head_of(arch, **settings).intermediate_size == width


def test_a_model_without_attention_gives_a_head_no_shape():
    with pytest.raises(TercelError, match="a mamba model has no attention heads"):
        head_of("mamba")


def test_capped_scores_need_eager_attention_and_get_it(tmp_path: Path):
    for arch in ("gemma2", "gpt_oss"):
        target = Target.load(str(save_tiny(tmp_path, arch, num_hidden_layers=4)))
        assert target.model.config._attn_implementation == "eager"
        assert target.tree_support.tree
    with pytest.raises(TercelError):
        Target.load(str(tmp_path / "gemma2"), attn_implementation="sdpa")


def test_a_text_ends_with_the_context_and_not_before():
    """Also where a block of drafts would reach further than the learned positions."""
    model = tiny_model("gpt2", n_positions=32)
    target = Target(model, tiny_tokenizer(), Source("gpt2", "gpt2", "folder", None))
    tokens = list(range(5, 25))
    with torch.no_grad():
        while len(tokens) < 32:
            tokens.append(int(model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    asked = [Request(tuple(tokens[:20]), SamplingParams(max_new_tokens=50, ignore_eos=True))]
    assert list(Engine(target, Vanilla()).generate(asked)[0].tokens) == tokens[20:]
    assert [target.block_depth(length) for length in (20, 29, 30, 31)] == [11, 2, 1, 0]
