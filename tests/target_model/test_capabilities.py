"""What the probe allows and refuses, and the reasons it gives."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AttentionInterface, AutoModelForCausalLM, Lfm2Config, MptConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from tercel.errors import TercelError
from tercel.target_model.capabilities import TreeSupport, check_steps, probe_tree_support
from tercel.target_model.model import Target
from tercel.target_model.sources import Source
from tests.tiny import ARCHS, OTHER_ARCHS, VOCAB, tiny_config, tiny_model

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "max_position_embeddings": 64,
}


def target_of(model) -> Target:
    return Target(model.eval().requires_grad_(False), None, Source("tiny", "tiny", "folder", None))


@pytest.mark.parametrize("arch", ARCHS + OTHER_ARCHS)
def test_every_tiny_architecture_takes_trees(arch):
    assert target_of(tiny_model(arch)).tree_support == TreeSupport(True, True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_is_not_taken_for_a_leak(dtype):
    model = tiny_model("llama", initializer_range=0.1).to(dtype)
    assert target_of(model).tree_support == TreeSupport(True, True)


def precise_on_single_tokens(module, query, key, value, attention_mask, **kwargs):
    """Attention as fused kernels have it: in float32 but for blocks under a mask."""
    block = attention_mask is not None and query.shape[2] > 1
    wide = [x if x is None or block else x.float() for x in (query, key, value, attention_mask)]
    out, weights = sdpa_attention_forward(module, *wide, **kwargs)
    return out.to(query.dtype), weights


@pytest.mark.parametrize("arch", ["llama", "qwen2", "mixtral"])
def test_rounding_of_blocks_alone_is_not_taken_for_a_leak(arch):
    """Tokens one by one then say nothing of the rounding that a block brings."""
    AttentionInterface.register("precise_on_single_tokens", precise_on_single_tokens)
    model = tiny_model(arch, initializer_range=0.2).to(torch.bfloat16)
    model.config._attn_implementation = "precise_on_single_tokens"
    assert target_of(model).tree_support == TreeSupport(True, True)


@pytest.mark.parametrize(
    "config",
    [
        Lfm2Config(**SIZES, layer_types=["conv", "conv", "full_attention", "conv"]),
        tiny_config("qwen3_next"),
    ],
    ids=["lfm2", "qwen3_next"],
)
def test_a_state_that_cannot_be_rolled_back_is_refused(config):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        target = target_of(AutoModelForCausalLM.from_config(config))
    support = target.tree_support
    assert not support.tree
    assert not support.chain
    with pytest.raises(TercelError, match=r"layers keep a state that cannot be rolled back.*only be decoded token"):
        support.require_tree("tiny")
    with pytest.raises(TercelError, match="tiny cannot verify drafts: its"):
        support.require_chain("tiny")


def causal_over_slots(module, query, key, value, attention_mask, **kwargs):
    """An attention that ignores the mask it is given: token `i` of a block sees every slot before it."""
    length, slots = query.shape[2], key.shape[2]
    seen = torch.ones(length, slots, dtype=torch.bool).tril(slots - length)[None, None]
    return sdpa_attention_forward(module, query, key, value, seen, **kwargs)


def test_an_attention_that_ignores_the_mask_verifies_chains_only():
    AttentionInterface.register("causal_over_slots", causal_over_slots)
    model = tiny_model("llama")
    model.config._attn_implementation = "causal_over_slots"
    support = target_of(model).tree_support
    assert (support.tree, support.chain) == (False, True)
    support.require_chain("tiny")
    with pytest.raises(
        TercelError, match=r"tiny cannot verify a draft tree: .*ignores the tree mask.*use --tree chain:4"
    ):
        support.require_tree("tiny")


def with_a_faint_leak(module, query, key, value, attention_mask, **kwargs):
    """An attention whose mask lets a thousandth of what is hidden through."""
    mask = None if attention_mask is None else attention_mask.clamp(min=-7.0)
    return sdpa_attention_forward(module, query, key, value, mask, **kwargs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_leak_smaller_than_rounding_is_found(dtype):
    AttentionInterface.register("with_a_faint_leak", with_a_faint_leak)
    model = tiny_model("llama", initializer_range=0.1).to(dtype)
    model.config._attn_implementation = "with_a_faint_leak"
    support = target_of(model).tree_support
    assert (support.tree, support.chain) == (False, False)  # a chain's later tokens leak as siblings do


def test_positions_counted_by_the_place_in_the_cache_verify_chains_only():
    sizes = {"d_model": 32, "n_heads": 4, "n_layers": 4, "max_seq_len": 64, "vocab_size": VOCAB}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        target = target_of(AutoModelForCausalLM.from_config(MptConfig(**sizes)))
    assert (target.tree_support.tree, target.tree_support.chain) == (False, True)
    assert "ignores the given positions" in target.tree_support.reason
    assert target.context_length == 64


class IgnoresCache(nn.Module):
    """A decoder that runs only the block it is given, as if there were no past."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, input_ids, cache=None, attention_mask=None, **kwargs):
        return self.decoder(input_ids=input_ids, use_cache=False)


def test_a_model_that_forgets_its_past_is_refused():
    target = target_of(tiny_model("llama"))
    target.stock.decoder = IgnoresCache(target.stock.decoder)
    support = probe_tree_support(target)
    assert not support.chain
    assert "does not see the tokens in the cache" in support.reason
    with pytest.raises(TercelError, match=r"tiny cannot be decoded: tokens one by one give other logits"):
        check_steps(target)


def test_a_kind_of_mask_that_is_not_known_is_refused():
    target = target_of(tiny_model("llama"))
    target.config = SimpleNamespace(layer_types=["full_attention", "chunked_attention"])
    support = probe_tree_support(target)
    assert not support.chain
    assert "chunked_attention layers want a mask of their own kind" in support.reason


def test_a_decoder_without_a_cache_argument_is_refused_with_its_own_words():
    target = target_of(tiny_model("llama"))

    class Plain(nn.Module):
        def forward(self, input_ids, position_ids, attention_mask, use_cache):
            raise AssertionError("never reached")

    target.stock.decoder = Plain()
    support = probe_tree_support(target)
    assert not support.chain
    assert "do not take" in support.reason or "does not take" in support.reason
    assert "cache" in support.reason
