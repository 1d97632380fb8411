"""A token of a block is, to the bit, what token-by-token decoding makes of it, wherever its ancestors' keys lie."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tercel.decode.engine import Engine
from tercel.decode.proposers import EAGLE3, VANILLA, make_proposer
from tercel.decode.sampling import SamplingParams
from tercel.decode.types import Request
from tercel.draft.shape import TreeShape
from tercel.target_model.masks import additive, slot_positions, visible_slots, within_window
from tercel.target_model.model import Target
from tercel.target_model.output import TargetOutput
from tercel.target_model.padding import missing
from tercel.target_model.prefill import prefill
from tercel.target_model.row_states import RowStates
from tercel.target_model.slot_free import Borders, slot_free_attention
from tercel.target_model.sources import Source
from tercel.target_model.stock import layer_inputs
from tests.measure.worlds import OwnTree, vanilla
from tests.target_model.test_model import ancestors, path_to, random_tree, some_tokens
from tests.tiny import LEARNED_POSITIONS, tiny_model, tiny_tokenizer

pytestmark = pytest.mark.usefixtures("every_core")
DTYPES = (torch.float32, torch.bfloat16)
# grouped heads and as many key heads as query heads, windows in all layers and in every other, learned positions
ARCHS = ("llama", "qwen3", "gemma3", "mistral", "gpt_neox", "phi3", "gpt2")
LAYERS = (1, 2, 3)
LENGTHS = [near + by for near in (64, 80, 144, 528, 1024, 1040, 2064) for by in (-1, 0, 1)]  # where borders move


class Keys:
    """Keys, values and a query for every node of a tree behind `committed` tokens: `[kv, S, D]`, `[q, T, D]`."""

    def __init__(self, committed: int, parents: list[int], heads: tuple[int, int, int], dtype: torch.dtype, seed: int):
        kv, groups, size = heads
        self.generator, self.dtype = torch.Generator().manual_seed(seed), dtype
        self.committed, self.parents, self.groups = committed, parents, groups
        nodes = len(parents)
        self.query = self.numbers(kv * groups, nodes, size)
        self.key, self.value = (self.numbers(kv, committed + nodes, size) for _ in range(2))
        self.depths = [len(path_to(node, parents)) - 1 for node in range(nodes)]

    def numbers(self, *shape: int) -> Tensor:
        return (2 * torch.randn(*shape, generator=self.generator)).to(self.dtype)

    def block(self, kept: list[int], nodes: list[int]) -> tuple[int, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """What a block of `nodes` is behind the committed tokens and the nodes `kept`: its length, positions, mask,
        queries, and keys and values in their slots."""
        slots = [*range(self.committed), *(self.committed + node for node in (*kept, *nodes))]
        mask = ancestors(self.parents)[nodes][:, nodes]
        positions = torch.tensor([self.committed + self.depths[node] for node in nodes])
        length = self.committed + len(kept)
        return length, positions, mask, self.query[:, nodes], self.key[:, slots], self.value[:, slots]


def attend(
    blocks: Sequence[tuple[int, Tensor, Tensor, Tensor, Tensor, Tensor]], window: int | None, extra: int = 0
) -> Tensor:
    """Attention over blocks of one width, a row each, with `extra` tokens that fill it up: `[B, T, q, D]`."""
    lengths, positions, masks, queries, keys, values = zip(*blocks, strict=True)
    width = len(positions[0])
    places, mask = torch.stack(positions), torch.stack(masks)
    seen = visible_slots(lengths, mask)
    near = seen & within_window(places, slot_positions(lengths, places), window) if window else seen
    split = Borders(lengths, places, mask).split(near, additive(near, queries[0].dtype), window is not None)
    key, value = (
        RowStates([F.pad(part, (0, 0, 0, extra), value=7.0)[None] for part in parts]) for parts in (keys, values)
    )
    return slot_free_attention(F.pad(torch.stack(queries), (0, 0, 0, extra)), key, value, split, 0.3)[:, :width]


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    data=st.data(),
    dtype=st.sampled_from(DTYPES),
    heads=st.tuples(st.integers(1, 3), st.integers(1, 4), st.sampled_from([16, 40, 64])),
    window=st.sampled_from([None, None, 1, 50, 150, 5000]),
)
def test_attention_does_not_know_slots_widths_and_padding(data, dtype, heads, window):
    rows = data.draw(st.integers(1, 3))
    nodes, bushy = data.draw(st.sampled_from([(44, 44), (44, 4), (80, 1), (110, 2)]))  # the last are deep
    nodes -= data.draw(st.integers(0, nodes // 2))
    worlds = []
    for row in range(rows):
        committed = data.draw(st.one_of(st.integers(1, 200), st.sampled_from(LENGTHS)))
        choose = random.Random(data.draw(st.integers(0, 999)))
        parents = [-1, *(choose.randrange(max(0, node - bushy), node) for node in range(1, nodes))]
        worlds.append(Keys(committed, parents, heads, dtype, row))
    whole = attend([world.block([], list(range(nodes))) for world in worlds], window, data.draw(st.integers(0, 3)))
    for row, world in enumerate(worlds):
        for leaf in {nodes - 1, world.depths.index(max(world.depths)), nodes // 2}:
            path = path_to(leaf, world.parents)
            # alone behind its ancestors, and as the end of a chain whose first tokens are kept
            for kept in {len(path) - 1, len(path) // 2}:
                chain = attend([world.block(path[:kept], path[kept:])], window, data.draw(st.integers(0, 3)))
                assert torch.equal(whole[row, leaf], chain[0, -1]), (row, leaf, kept)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_is_that_of_exact_sums(dtype):
    for window in (None, 70):
        world = Keys(150, [-1, 0, 0, 1, 2, 3], (2, 3, 16), dtype, 0)
        length, positions, mask, query, key, value = world.block([], list(range(6)))
        seen = visible_slots([length], mask[None])
        if window:
            seen &= within_window(positions[None], slot_positions([length], positions[None]), window)
        ours = attend([world.block([], list(range(6)))], window)[0]
        keys, values = (part.double().repeat_interleave(3, 0) for part in (key, value))
        exact = F.scaled_dot_product_attention(query.double(), keys, values, seen, scale=0.3).transpose(0, 1)
        torch.testing.assert_close(ours.double(), exact, rtol=0, atol=3e-2 if dtype == torch.bfloat16 else 1e-5)


def target_of(arch: str, dtype: torch.dtype, **sizes: int) -> Target:
    """Wide enough that all of its products are those of large models: very small ones have a kernel of their own."""
    heads = {} if arch in ("gpt_neox", "phi3", "gpt2") else {"head_dim": 32}
    name = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer"} if arch == "gpt2" else {}
    sizes = {"hidden_size": 128, "num_hidden_layers": 4, **sizes}
    model = tiny_model(arch, **{name.get(key, key): size for key, size in sizes.items()}, **heads).to(dtype)
    return Target(model, tiny_tokenizer(), Source(arch, arch, "folder", None), same_bits=True)


def step(target: Target, cache, tokens: list[int], positions: Tensor, mask: Tensor) -> TargetOutput:
    return target.forward(torch.tensor([tokens]), positions[None], cache, mask[None], LAYERS)


def same_bits(target: Target, one: TargetOutput, node: int, other: TargetOutput) -> bool:
    pairs = [(target.logits(one.hidden), target.logits(other.hidden)), *zip(one.layers, other.layers, strict=True)]
    return all(torch.equal(a[0, node], b[0, 0]) for a, b in pairs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("arch", ARCHS)
def test_a_tree_has_the_bits_of_its_straight_paths(arch, dtype):
    target = target_of(arch, dtype)
    for nodes, prefix in ((7, some_tokens(13, 0)), (12, some_tokens(18, 1)), (41, some_tokens(9, 2))):
        parents, tokens = random_tree(nodes, nodes), some_tokens(nodes, 3)
        cache = target.new_cache(1, 80)
        prefill(target, [prefix], cache)
        depths = torch.tensor([len(path_to(node, parents)) - 1 for node in range(nodes)])
        tree = step(target, cache, tokens, depths + len(prefix), ancestors(parents))
        for leaf in {max(range(nodes), key=lambda n: (int(depths[n]), n)), nodes - 1, nodes // 2}:
            straight = target.new_cache(1, 80)
            prefill(target, [prefix], straight)
            for depth, node in enumerate(path_to(leaf, parents)):
                place = torch.tensor([len(prefix) + depth])
                alone = step(target, straight, [tokens[node]], place, torch.ones(1, 1, dtype=torch.bool))
                straight.keep([[0]])
                assert same_bits(target, tree, node, alone), (nodes, node)


@pytest.mark.parametrize("length", [78, 143, 1022, 1039, 2049])
@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_a_tree_across_a_border_has_the_bits_of_its_straight_paths(arch, length):
    windows = {"sliding_window": 40} if arch == "gemma3" else {}
    target = target_of(arch, torch.bfloat16, num_hidden_layers=2, max_position_embeddings=4096, **windows)
    parents, tokens, prefix = [-1, 0, 0, 1, 1, 3, 2, 5, 7, 4], some_tokens(10, 3), some_tokens(length, 0)
    depths = torch.tensor([len(path_to(node, parents)) - 1 for node in range(10)])
    cache = target.new_cache(1, length + 10)
    prefill(target, [prefix], cache)
    tree = target.forward(torch.tensor([tokens]), (depths + length)[None], cache, ancestors(parents)[None], (0, 1, 2))
    straight = target.new_cache(1, length + 10)
    prefill(target, [prefix], straight)
    for depth, node in enumerate(path_to(8, parents)):
        place = torch.tensor([[length + depth]])
        alone = target.forward(torch.tensor([[tokens[node]]]), place, straight, torch.ones(1, 1, 1).bool(), (0, 1, 2))
        straight.keep([[0]])
        assert same_bits(target, tree, node, alone), (length, node)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_alone_and_beside_others(dtype):
    target = target_of("mistral", dtype)
    texts, block = [some_tokens(211, 0), some_tokens(4, 1), some_tokens(79, 2)], some_tokens(5, 3)
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    together = target.new_cache(3, 240)
    for row, text in enumerate(texts):
        prefill(target, [text], together, [row])
    positions = torch.tensor([[len(text) + i for i in range(5)] for text in texts])
    out = target.forward(torch.tensor([block] * 3), positions, together, mask.expand(3, -1, -1), LAYERS)
    for row, text in enumerate(texts):
        cache = target.new_cache(1, 240)
        prefill(target, [text], cache)
        alone = step(target, cache, block, positions[row], mask)
        for ours, theirs in zip((out.hidden, *out.layers), (alone.hidden, *alone.layers), strict=True):
            assert torch.equal(ours[row], theirs[0])


@pytest.mark.parametrize("arch", ["qwen3", "gemma3"])
def test_bfloat16_text_with_drafts_is_the_text_without(arch):
    target = target_of(arch, torch.bfloat16)
    for temperature in (0.0, 1.0):
        requests = [
            Request(tuple(some_tokens(11 + seed, seed)), SamplingParams(temperature, max_new_tokens=24, seed=seed))
            for seed in range(3)
        ]
        drafted = Engine(target, OwnTree(target)).generate(requests)
        assert sum(sum(result.accepted) for result in drafted) > 10
        assert [r.tokens for r in drafted] == [r.tokens for r in vanilla(target).generate(requests)]


def test_rows_are_added_only_where_products_would_take_another_kernel():
    assert [missing(1, width, torch.bfloat16) for width in (1, 2, 3, 31)] == [1, 0, 0, 0]
    assert missing(2, 1, torch.bfloat16) == 0
    for rows in range(1, 9):
        for width in range(1, 9):
            extra = missing(rows, width, torch.float32)
            assert rows * (width + extra) % 4 == 0
            assert all(rows * (width + less) % 4 for less in range(extra))


def test_float32_is_run_as_ever_unless_the_same_bits_are_asked_for():
    for dtype, tokens in ((torch.float32, 1), (torch.bfloat16, 2)):
        target = Target(tiny_model("llama").to(dtype), tiny_tokenizer(), Source("llama", "llama", "folder", None))
        cache = target.new_cache(1, 8)
        prefill(target, [some_tokens(3, 0)], cache)
        with layer_inputs(target.stock.layers, [0]) as seen:
            step(target, cache, [5], torch.tensor([3]), torch.ones(1, 1, dtype=torch.bool))
        assert seen[0].shape[1] == tokens


def test_positions_of_padding_stay_inside_the_context():
    assert "gpt2" in LEARNED_POSITIONS  # a position past the last would be an error there
    target = target_of("gpt2", torch.float32)
    cache = target.new_cache(1, 256)
    prefill(target, [some_tokens(255, 0)], cache)
    out = step(target, cache, [5], torch.tensor([255]), torch.ones(1, 1, dtype=torch.bool))
    assert out.hidden.shape == (1, 1, 128)
    assert bool(out.hidden.isfinite().all())


@pytest.mark.real
def test_the_default_targets_bfloat16_texts_are_the_same_with_the_shipped_head():
    from tercel.decode.compat import load_draft

    target = Target.load("smollm2-135m", dtype=torch.bfloat16)
    drafts = make_proposer(EAGLE3, target, head=load_draft("smollm2-135m", target), shape=TreeShape(6, 4, 20))
    plain = make_proposer(VANILLA, target)
    questions = ("Write a short story about a falcon.", "List three uses of a brick.", "Why is the sky blue?")
    for temperature in (0.0, 1.0):
        params = [SamplingParams(temperature, max_new_tokens=40, seed=seed) for seed in range(3)]
        asked = [Request.chat(target, question, p) for question, p in zip(questions, params, strict=True)]
        drafted = Engine(target, drafts).generate(asked)
        assert sum(sum(result.accepted) for result in drafted) > 10
        assert [r.tokens for r in drafted] == [r.tokens for r in Engine(target, plain).generate(asked)]
