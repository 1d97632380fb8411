"""Heads of EAGLE-1 and 2: read, and drafting what a stock decoder layer in their arrangement says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from tercel.decode.compat import load_draft
from tercel.decode.eagle3 import Eagle3
from tercel.decode.engine import Engine
from tercel.decode.sampling import SamplingParams
from tercel.decode.types import Request
from tercel.decode.vanilla import Vanilla
from tercel.draft import Eagle1Head
from tercel.draft.binding import bind
from tercel.draft.shape import TreeShape
from tercel.errors import TercelError
from tercel.interop.formats.read import read_head
from tercel.target_model.model import Target
from tests.cli.running import refused, run
from tests.decode.drafts import Watched, random_draft, tiny_target
from tests.interop.foreign import edit, write_eagle1

PROMPT = (5, 17, 33, 8, 90, 41, 12)


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target("llama")


@pytest.fixture
def folder(target: Target, tmp_path: Path) -> Path:
    """A random head of the target's sizes; 8 heads of keys would not show a mix-up of queries and keys."""
    return write_eagle1(random_draft(target), tmp_path / "head")


def stock_chain(folder: Path, target: Target, tokens: tuple[int, ...], depth: int) -> list[int]:
    """The greedy chain behind `tokens` by transformers' own layer, everything run anew at every step."""
    stored = torch.load(folder / "pytorch_model.bin", weights_only=True)
    c = read_head(folder).head.config
    config = LlamaConfig(
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_attention_heads=c.num_attention_heads,
        num_key_value_heads=c.num_key_value_heads,
        head_dim=c.head_dim,
        rms_norm_eps=c.rms_norm_eps,
        rope_parameters=c.rope_parameters,
        attn_implementation="eager",
    )
    layer = LlamaDecoderLayer(config, 0)
    layer.input_layernorm = nn.Identity()
    prefix = "layers.0."
    layer.load_state_dict({k.removeprefix(prefix): v for k, v in stored.items() if k.startswith(prefix)})
    features = target.encode(torch.tensor([tokens[:-1]])).hidden  # after the final norm
    following = list(tokens[1:])
    for _ in range(depth):
        embedded = stored["embed_tokens.weight"][torch.tensor([following])]
        x = torch.cat([embedded, features], -1) @ stored["fc.weight"].T + stored["fc.bias"]
        output = run_layer(layer, config, x)
        following.append(int(target.logits(output)[0, -1].argmax()))
        features = torch.cat([features, output[:, -1:]], 1)
    return following[len(tokens) - 1 :]


@torch.no_grad()
def run_layer(layer: LlamaDecoderLayer, config: LlamaConfig, x: Tensor) -> Tensor:
    length = x.shape[1]
    positions = torch.arange(length)[None]
    mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
    rotary = LlamaRotaryEmbedding(config)(x, positions)
    out = layer(x, attention_mask=mask, position_ids=positions, position_embeddings=rotary)
    return out[0] if isinstance(out, tuple) else out


def test_its_chain_is_the_stock_layers(folder: Path, target: Target) -> None:
    watched = Watched(Eagle3(load_draft(str(folder), target), target, TreeShape.chain(3)))
    Engine(target, watched).generate([Request(PROMPT, SamplingParams(max_new_tokens=6))])
    assert len(watched.seen) >= 3
    for tokens, proposal in watched.seen:
        assert proposal.tree.token_list[1:] == stock_chain(folder, target, tokens, 3)


def test_the_text_is_the_targets(folder: Path, target: Target) -> None:
    asked = [Request(PROMPT, SamplingParams(max_new_tokens=12)), Request(PROMPT[:3], SamplingParams(max_new_tokens=9))]
    wanted = [result.tokens for result in Engine(target, Vanilla(), slots=2).generate(asked)]
    tree = Eagle3(load_draft(str(folder), target), target, TreeShape(3, 3, 9))
    assert [result.tokens for result in Engine(target, tree, slots=2).generate(asked)] == wanted


def test_it_reads_the_last_hidden_state_whatever_the_depth(folder: Path) -> None:
    head = read_head(folder)
    assert isinstance(head.head, Eagle1Head)
    assert head.format == "eagle1"
    assert head.head.config.feature_layers == ()
    assert head.head.config.placed(30).feature_layers == (30,)
    with pytest.raises(TercelError, match="load it together with the target"):
        head.head.logits(torch.zeros(1, 32))


def test_the_head_that_was_put_beside_a_target_stays_as_it_was(folder: Path, target: Target) -> None:
    model = read_head(folder, num_layers=target.num_layers)
    output = torch.randn(2, 32)
    assert torch.equal(bind(model, target).head_as(Eagle1Head).logits(output), target.logits(output))
    with pytest.raises(TercelError, match="load it together with the target"):
        model.head_as(Eagle1Head).logits(output)


def test_it_is_not_exported(folder: Path, tmp_path: Path) -> None:
    refused(run("export", str(folder), "--to", "vllm", "--out", str(tmp_path / "out")), "EAGLE-1 or EAGLE-2")
    assert not (tmp_path / "out").exists()


def test_inspect_tells_what_it_is(folder: Path) -> None:
    told = run("inspect", str(folder))
    assert told.code == 0, told.err
    assert "EAGLE-1" in told.out


def test_sizes_that_contradict_the_weights(folder: Path) -> None:
    edit(folder, lambda config: config.update(intermediate_size=99))
    with pytest.raises(TercelError, match=r"layers\.0\.mlp\.\w+_proj\.weight .* but the head's sizes ask for"):
        read_head(folder)


def test_a_tensor_is_missing(folder: Path) -> None:
    stored = torch.load(folder / "pytorch_model.bin", weights_only=True)
    del stored["layers.0.mlp.up_proj.weight"]
    torch.save(stored, folder / "pytorch_model.bin")
    with pytest.raises(TercelError, match=r"lacks layers\.0\.mlp\.up_proj\.weight"):
        read_head(folder)


def test_another_targets(folder: Path, tmp_path: Path) -> None:
    edit(folder, lambda config: config.update(vocab_size=77))
    with pytest.raises(TercelError, match=r"embed_tokens\.weight"):
        read_head(folder)
