"""One forward over a tree, a ragged batch or a chunk must be what token-by-token decoding gives."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from tercel.errors import TercelError
from tercel.target_model.model import Target
from tercel.target_model.output import TargetOutput
from tercel.target_model.prefill import prefill
from tercel.target_model.sources import Source
from tercel.target_model.structure import default_feature_layers
from tests.tiny import ARCHS, LEARNED_POSITIONS, OTHER_ARCHS, VOCAB, tiny_model, tiny_tokenizer

PREFIX = 13  # longer than the tiny models' sliding window of 8
LAYERS = (2, 4, 5)


@cache
def target_of(arch: str) -> Target:
    return Target(tiny_model(arch), tiny_tokenizer(), Source(arch, arch, "folder", None))


def some_tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, VOCAB, (count,), generator=generator).tolist()


def random_tree(nodes: int, seed: int) -> list[int]:
    """Parent of every node (-1 for the root), parents first."""
    generator = torch.Generator().manual_seed(seed)
    return [-1] + [int(torch.randint(i, (1,), generator=generator)) for i in range(1, nodes)]


def path_to(node: int, parents: list[int]) -> list[int]:
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def ancestors(parents: list[int]) -> Tensor:
    mask = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for node in range(len(parents)):
        mask[node, path_to(node, parents)] = True
    return mask


def one_by_one(target: Target, tokens: list[int]) -> TargetOutput:
    """Token-by-token decoding with a fresh cache: what everything else is compared with."""
    cache = target.new_cache(1, len(tokens))
    outs = []
    for position, token in enumerate(tokens):
        outs.append(target.forward(torch.tensor([[token]]), torch.tensor([[position]]), cache, capture=LAYERS))
        cache.keep([[0]])
    return TargetOutput(
        torch.cat([o.hidden for o in outs], 1),
        tuple(torch.cat(parts, 1) for parts in zip(*(o.layers for o in outs), strict=True)),
    )


def verify_tree(target: Target, prefix: list[int], tokens: list[int], parents: list[int], cache) -> TargetOutput:
    depths = torch.tensor([[len(path_to(node, parents)) - 1 for node in range(len(parents))]])
    return target.forward(torch.tensor([tokens]), depths + len(prefix), cache, ancestors(parents)[None], LAYERS)


def same(target: Target, ours: TargetOutput, truth: TargetOutput) -> None:
    """Equal but for float32's rounding, of which the largest number in a sum decides."""
    for mine, wanted in (
        (target.logits(ours.hidden), target.logits(truth.hidden)),
        (ours.features, truth.features),
    ):
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=3e-5 * max(10.0, float(wanted.abs().max())))


def at(out: TargetOutput, row: int, part: slice | list[int]) -> TargetOutput:
    return TargetOutput(out.hidden[row : row + 1, part], tuple(x[row : row + 1, part] for x in out.layers))


@pytest.mark.parametrize("arch", ARCHS + OTHER_ARCHS)
def test_a_tree_is_every_branch_decoded_token_by_token(arch):
    target, prefix = target_of(arch), some_tokens(PREFIX, 1)
    for seed in (0, 1):
        parents, tokens = random_tree(7, seed), some_tokens(7, 10 + seed)
        cache = target.new_cache(1, 40)
        prefill(target, [prefix], cache)
        tree = verify_tree(target, prefix, tokens, parents, cache)
        for leaf in set(range(7)) - set(parents):
            path = path_to(leaf, parents)
            truth = one_by_one(target, prefix + [tokens[node] for node in path])
            same(target, at(tree, 0, path), at(truth, 0, slice(PREFIX, None)))


@pytest.mark.parametrize("arch", ARCHS + OTHER_ARCHS)
def test_a_kept_path_continues_as_if_decoded_from_scratch(arch):
    target, prefix = target_of(arch), some_tokens(PREFIX, 2)
    tokens, parents = some_tokens(5, 20), [-1, 0, 0, 2, 2]
    cache = target.new_cache(1, 40)
    prefill(target, [prefix], cache)
    verify_tree(target, prefix, tokens, parents, cache)
    cache.keep([[0, 2, 4]])
    # a second block that is thrown away whole must leave no trace
    target.forward(torch.tensor([[9, 8]]), torch.tensor([[PREFIX + 3, PREFIX + 4]]), cache)
    cache.keep([[]])
    more = some_tokens(3, 21)
    kept = [*prefix, tokens[0], tokens[2], tokens[4]]
    (out,) = prefill(target, [more], cache, capture=LAYERS)
    assert cache.lengths == [PREFIX + 6]
    same(target, out, at(one_by_one(target, kept + more), 0, slice(PREFIX + 3, None)))


@pytest.mark.parametrize("arch", ARCHS + OTHER_ARCHS)
def test_rows_of_different_lengths_equal_rows_alone(arch):
    target = target_of(arch)
    prompts = [some_tokens(n, 30 + n) for n in (PREFIX, 3, 9)]
    together, alone = target.new_cache(1, 2), [target.new_cache(1, 20) for _ in prompts]
    for row, prompt in enumerate(prompts):
        prefill(target, [prompt], alone[row])
        prefill(target, [prompt], together, [row])
        together.add_rows(int(row < 2))
    parents, blocks = [-1, 0, 0, 1], [some_tokens(4, 40 + row) for row in range(3)]
    positions = torch.tensor([[0, 1, 1, 2]]) + torch.tensor(together.lengths)[:, None]
    block_mask = ancestors(parents)[None].expand(3, -1, -1)
    out = target.forward(torch.tensor(blocks), positions, together, block_mask, LAYERS)
    for row, prompt in enumerate(prompts):
        same(target, at(out, row, slice(None)), verify_tree(target, prompt, blocks[row], parents, alone[row]))
    # ragged paths, one row leaves, the order changes: each still continues as its own text
    paths = [[0, 1, 3], [], [0, 2]]
    together.keep(paths)
    together.select_rows([2, 0])
    texts = [prompts[row] + [blocks[row][node] for node in paths[row]] for row in (2, 0)]
    out = target.forward(torch.tensor([[7], [7]]), torch.tensor([[len(t)] for t in texts]), together, capture=LAYERS)
    for row, text in enumerate(texts):
        same(target, at(out, row, slice(None)), at(one_by_one(target, [*text, 7]), 0, [len(text)]))


@pytest.mark.parametrize("arch", ARCHS + OTHER_ARCHS)
def test_chunks_the_whole_and_padding_give_the_same(arch):
    target, tokens = target_of(arch), some_tokens(PREFIX, 3)
    truth = one_by_one(target, tokens)
    same(target, prefill(target, [tokens], target.new_cache(1, 4), capture=LAYERS, chunk=5)[0], truth)
    padded = torch.tensor([tokens, tokens[:6] + [0] * (PREFIX - 6)])
    out = target.encode(padded, LAYERS)
    same(target, at(out, 0, slice(None)), truth)
    same(target, at(out, 1, slice(6)), at(truth, 0, slice(6)))


@pytest.mark.parametrize("arch", ARCHS + OTHER_ARCHS)
def test_outputs_are_the_models_own(arch):
    target, tokens = target_of(arch), torch.tensor([some_tokens(PREFIX, 4)])
    own = target.model(input_ids=tokens, use_cache=False, output_hidden_states=True)
    out = target.encode(tokens, LAYERS)
    torch.testing.assert_close(target.logits(out.hidden), own.logits, rtol=1e-5, atol=1e-5)
    for captured, layer in zip(out.layers, LAYERS, strict=True):
        assert torch.equal(captured, own.hidden_states[layer])
    # a head rotates, so what the target learned for positions is not for it
    entered = target.model.get_input_embeddings()(tokens) if arch in LEARNED_POSITIONS else own.hidden_states[0]
    torch.testing.assert_close(target.embed(tokens), entered, rtol=1e-5, atol=1e-5)


def test_a_soft_cap_is_found_even_where_the_probe_hardly_shows_it():
    model = tiny_model("gemma3", initializer_range=0.05, final_logit_softcapping=30.0)
    target = Target(model, None, Source("gemma3", "gemma3", "folder", None))
    assert target.output_layer.soft_cap == 30.0


@pytest.mark.parametrize(
    ("arch", "setting"), [("gemma3", {"final_logit_softcapping": 5.0}), ("granite", {"logits_scaling": 3.0})]
)
def test_caps_and_scales_of_the_logits(arch, setting):
    target = Target(tiny_model(arch, **setting), None, Source(arch, arch, "folder", None))
    tokens = torch.tensor([some_tokens(8, 5)])
    own = target.model(input_ids=tokens, use_cache=False).logits
    torch.testing.assert_close(target.logits(target.encode(tokens).hidden), own, rtol=1e-5, atol=1e-5)
    assert target.output_layer.scale != 1.0 or target.output_layer.soft_cap is not None


def test_an_embedding_multiplier_is_found():
    model = tiny_model("granite", embedding_multiplier=12.0)
    target = Target(model, None, Source("granite", "granite", "folder", None))
    tokens = torch.tensor([some_tokens(8, 6)])
    own = model(input_ids=tokens, use_cache=False, output_hidden_states=True).hidden_states[0]
    torch.testing.assert_close(target.embed(tokens), own, rtol=1e-5, atol=1e-5)
    assert abs(target.embedding_scale - 12) < 1e-4


def test_layers_can_be_any_and_are_checked():
    target = Target(tiny_model("llama"), None, Source("llama", "llama", "folder", None))
    tokens = torch.tensor([some_tokens(5, 7)])
    states = target.model(input_ids=tokens, output_hidden_states=True).hidden_states
    for layers in ((0,), (0, 4, 7), (1, 2, 3, 5, 6), (8,), (3, 8)):  # 8: after the final norm
        assert torch.equal(target.encode(tokens, layers).features, torch.cat([states[i] for i in layers], -1))
    with pytest.raises(TercelError, match=r"feature layer 9 is out of range: llama has layers 0\.\.7"):
        target.encode(tokens, (2, 9))


def test_what_one_caller_captures_no_other_sees():
    """Nor does a forward that failed leave anything behind."""
    target, tokens = target_of("llama"), torch.tensor([some_tokens(5, 8)])
    first = target.encode(tokens, (4, 2))
    assert [len(target.encode(tokens, layers).layers) for layers in ((), (2,))] == [0, 1]
    assert torch.equal(target.encode(tokens, (2, 2, 4)).features, torch.cat([first.layers[i] for i in (1, 1, 0)], -1))
    with pytest.raises(IndexError):
        target.encode(torch.tensor([[VOCAB]]), (2,))
    assert not any(layer._forward_pre_hooks for layer in target.stock.layers)


@pytest.mark.parametrize(("layers", "expected"), [(30, (2, 15, 27)), (7, (2, 3, 4)), (6, (0, 3, 5)), (3, (0, 1, 2))])
def test_default_layers(layers, expected):
    assert default_feature_layers(layers) == expected


def test_two_layers_have_no_default():
    with pytest.raises(TercelError, match="name the feature layers yourself"):
        default_feature_layers(2)


def test_an_empty_prompt_is_refused():
    target = target_of("llama")
    with pytest.raises(TercelError, match="empty prompt"):
        prefill(target, [[]], target.new_cache(1, 4))
