"""Models without rollback are decoded token by token with `transformers`' own cache, as `generate()` does."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, OPTConfig, RwkvConfig

from tercel.decode.eagle3 import Eagle3
from tercel.decode.engine import Engine
from tercel.decode.sampling import SamplingParams
from tercel.decode.types import Request
from tercel.decode.vanilla import Vanilla
from tercel.draft.shape import TreeShape
from tercel.errors import TercelError
from tercel.target_model.model import Target
from tercel.target_model.prefill import prefill
from tercel.target_model.sources import Source
from tests.decode.drafts import random_draft, tiny_target
from tests.tiny import STEP_ARCHS, VOCAB

PROMPTS = [tuple(range(5, 5 + n)) for n in (5, 20, 1)]


@pytest.mark.parametrize("arch", STEP_ARCHS)
def test_token_by_token_equals_generate(arch):
    target = tiny_target(arch)
    assert not target.tree_support.chain
    truth = []
    for prompt in PROMPTS:
        tokens = torch.tensor([prompt])
        out = target.model.generate(
            tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=16, eos_token_id=VOCAB
        )
        truth.append(tuple(out[0, len(prompt) :].tolist()))
    lengths = (16, 9, 12)  # rows leave at different times
    asked = [
        Request(prompt, SamplingParams(max_new_tokens=n, ignore_eos=True))
        for prompt, n in zip(PROMPTS, lengths, strict=True)
    ]
    for slots in (1, 2, 3):
        results = Engine(target, Vanilla(), slots=slots).generate(asked)
        assert [r.tokens for r in results] == [t[:n] for t, n in zip(truth, lengths, strict=True)]


def test_features_of_steps_are_those_of_the_whole():
    target, tokens = tiny_target("qwen3_next"), list(PROMPTS[1])
    cache = target.new_cache(1, 0)
    pieces = (tokens[:5], tokens[5:])  # the second, on from a state, token by token
    outs = [prefill(target, [piece], cache, capture=(1, 4))[0] for piece in pieces]
    features = torch.cat([out.features for out in outs], 1)
    torch.testing.assert_close(features, target.encode(torch.tensor([tokens]), (1, 4)).features, rtol=1e-2, atol=1e-3)


def test_a_part_of_a_block_cannot_be_kept():
    target = tiny_target("bloom")
    cache = target.new_cache(1, 0)
    target.forward(torch.tensor([[5, 6]]), torch.tensor([[0, 1]]), cache)
    with pytest.raises(TercelError, match="cannot forget a part of 2 tokens"):
        cache.keep([[0]])


def test_drafts_are_refused_with_the_reason():
    target = tiny_target("bloom")
    with pytest.raises(TercelError, match=r"bloom cannot verify a draft tree: .*only be decoded token by token"):
        Engine(target, Eagle3(random_draft(target), target, TreeShape(2, 2, 4))).loop()


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (RwkvConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=4, attention_hidden_size=32), "be decoded"),
        (
            OPTConfig(
                vocab_size=VOCAB,
                hidden_size=32,
                ffn_dim=64,
                num_hidden_layers=4,
                num_attention_heads=4,
                word_embed_proj_dim=16,
            ),
            "embeddings of width 16 but layers of width 32",
        ),
    ],
)
def test_what_cannot_be_decoded_at_all_is_refused_when_loaded(config, why):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(TercelError, match=why):
        Target(model, None, Source("tiny", "tiny", "folder", None))
