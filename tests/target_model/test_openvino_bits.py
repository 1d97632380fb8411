"""A token has the same bits in every block that OpenVINO computes: alone, in a tree, wherever its ancestors lie."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

pytest.importorskip("openvino", reason="openvino is not installed: pip install 'tercel[openvino]'")

import openvino as ov

from tercel.target_model.openvino import blocks
from tercel.target_model.openvino.places import BLOCK, NOWHERE, last_position, positions_of, slot, slots_before
from tercel.target_model.openvino.runtime import CompiledGraph
from tercel.target_model.prefill import prefill
from tests.target_model.test_openvino import on_openvino, reference_of
from tests.tiny import VOCAB

pytestmark = pytest.mark.usefixtures("every_core")
LAYERS = (0, 1, 2)
# around every border of slots and chunks, and in between
LENGTHS = (1, 128, 380, 383, 384, 767, 768, 1100, 1663, 1664)
PARENTS = (-1, 0, 0, 0, 1, 1, 2, 3, 4, 5, 8, 8, 9, 6)
PATH = (0, 1, 4, 8, 11)  # through the tree, siblings and cousins between


def tree_mask(parents: tuple[int, ...]) -> Tensor:
    seen = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents[1:], 1):
        seen[node] |= seen[parent]
    return seen


@pytest.mark.parametrize(
    ("arch", "dtype", "weights"),
    [
        ("llama", torch.bfloat16, None),
        ("gpt2", torch.bfloat16, None),
        ("gemma3", torch.float32, None),
        ("llama", torch.bfloat16, "int8"),
    ],
    ids=["llama bfloat16", "gpt2 bfloat16", "gemma3 float32", "llama int8"],
)
def test_a_path_of_a_tree_is_what_its_tokens_give_one_by_one(
    arch: str, dtype: torch.dtype, weights: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "OFTEN", 7)  # the first by the graph for all sizes, the rest by those for one size
    target = on_openvino(reference_of(arch, dtype, weights, max_position_embeddings=2048))
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(4, VOCAB, (max(LENGTHS),), generator=generator)
    seen, widest = tree_mask(PARENTS), len(PARENTS)
    depths = seen.sum(-1) - 1
    for length in LENGTHS:
        tree = torch.randint(4, VOCAB, (1, widest), generator=generator)
        reach = min(len(PATH), target.block_depth(length) + 1)
        one, other = (target.new_cache(1, 0) for _ in range(2))
        for cache in (one, other):
            prefill(target, [prompt[:length].tolist()], cache)
        nodes = [node for node in range(widest) if depths[node] < reach]
        part = tree[:, nodes], depths[None, nodes] + length, one, seen[nodes][:, nodes][None]
        together = target.forward(*part, capture=LAYERS)
        logits = target.logits(together.hidden)
        for at, node in enumerate(PATH[:reach]):
            position = torch.tensor([[length + at]])
            mask = torch.ones(1, 1, 1, dtype=torch.bool)
            alone = target.forward(tree[:, node : node + 1], position, other, mask, capture=LAYERS)
            other.keep([[0]])
            place = nodes.index(node)
            for ours, theirs in zip([alone.hidden, *alone.layers], [together.hidden, *together.layers], strict=True):
                assert torch.equal(ours[:, 0], theirs[:, place]), (length, at)
            assert torch.equal(target.logits(alone.hidden)[:, 0], logits[:, place]), (length, at)


def test_the_same_bits_in_ragged_batches_across_chunks() -> None:
    """A row's trees give what they give without the others, whatever the chunks that these lie in; also after rows
    have grown into another chunk, and left."""
    target = on_openvino(reference_of("llama", torch.bfloat16, max_position_embeddings=2048))
    generator = torch.Generator().manual_seed(1)
    lengths = [60, 1100, 379, 700]
    batch = target.new_cache(len(lengths), 0)
    alone = [target.new_cache(1, 0) for _ in lengths]
    for row, length in enumerate(lengths):
        prompt = torch.randint(4, VOCAB, (length,), generator=generator).tolist()
        for cache, place in ((batch, row), (alone[row], 0)):
            prefill(target, [prompt], cache, [place])
    seen = tree_mask(PARENTS)
    for step in range(3):
        tokens = torch.randint(4, VOCAB, (len(lengths), len(PARENTS)), generator=generator)
        positions = torch.tensor(batch.lengths)[:, None] + seen.sum(-1) - 1
        together = target.forward(tokens, positions, batch, seen.expand(len(lengths), -1, -1), LAYERS)
        logits = target.logits(together.hidden)
        for row, cache in enumerate(alone):
            own = slice(row, row + 1)
            single = target.forward(tokens[own], positions[own], cache, seen[None], LAYERS)
            ours, theirs = [together.hidden, *together.layers], [single.hidden, *single.layers]
            assert all(torch.equal(one[row], other[0]) for one, other in zip(ours, theirs, strict=True)), (step, row)
            assert torch.equal(target.logits(single.hidden)[0], logits[row]), (step, row)
            cache.keep([PATH])
        batch.keep([PATH] * len(lengths))
        if step == 1:
            stay = [3, 0, 2]
            batch.select_rows(stay)
            lengths, alone = [lengths[row] for row in stay], [alone[row] for row in stay]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_prompts_have_the_bits_of_their_tokens_one_by_one(dtype: torch.dtype) -> None:
    """Whatever is run beside them, and wherever they are cut."""
    target = on_openvino(reference_of("llama", dtype, max_position_embeddings=2048))
    generator = torch.Generator().manual_seed(2)
    lengths = [700, 60, 379, 1200, 500, 130]
    prompts = [torch.randint(4, VOCAB, (length,), generator=generator).tolist() for length in lengths]
    one_by_one = []
    for prompt in prompts:
        cache, found = target.new_cache(1, 0), []
        for position, token in enumerate(prompt):
            mask = torch.ones(1, 1, 1, dtype=torch.bool)
            found.append(target.forward(torch.tensor([[token]]), torch.tensor([[position]]), cache, mask).hidden[0])
            cache.keep([[0]])
        one_by_one.append(torch.cat(found))
    for chunk in (512, 300, 77):
        cache = target.new_cache(len(prompts), 0)
        for row, out in enumerate(prefill(target, prompts, cache, chunk=chunk)):
            assert torch.equal(out.hidden[0], one_by_one[row]), (chunk, row)


def test_every_token_has_a_slot_of_its_own_and_blocks_stay_in_their_chunk() -> None:
    slots = [slot(position) for position in range(4000)]
    assert all(one < other for one, other in itertools.pairwise(slots))
    where = positions_of(max(slots) + 1)
    assert where[slots].tolist() == list(range(4000))
    assert int((where < NOWHERE).sum()) == 4000
    for length in range(3990):
        keys = slots_before(length) + BLOCK
        chunk = 512 if keys <= 1024 else 1024
        deepest = last_position(length)
        assert deepest >= length
        # an ancestor's key lies in one chunk, committed or in the block, and as many keys make the same chunks
        assert {slot(p) // chunk for p in (length, deepest)} == {slots_before(length) // chunk, (keys - 1) // chunk}
        regimes = {slots_before(p) + width > 1024 for p in (length, deepest) for width in (1, BLOCK)}
        assert len(regimes) == 1
        assert slots_before(length) == 0 or where[: slots_before(length)].lt(length).sum() == length


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_with_int8_weights_treat_a_row_alike_whatever_comes_with_it(dtype: torch.dtype) -> None:
    width, generator = 576, torch.Generator().manual_seed(0)
    kind = {torch.float32: ov.Type.f32, torch.bfloat16: ov.Type.bf16}[dtype]
    rows = ov.opset13.parameter([-1, width], kind)
    codes = torch.randint(-127, 128, (192, width), generator=generator, dtype=torch.int8)
    scales = torch.rand(192, 1, generator=generator)
    weights = ov.opset13.multiply(ov.opset13.convert(codes.numpy(), "f32"), scales.numpy())
    product = ov.opset13.matmul(ov.opset13.convert(rows, "f32"), weights, False, True)
    graph = CompiledGraph(ov.Model([ov.opset13.convert(product, kind)], [rows]), dtype)
    states = torch.randn(100, width, generator=generator).to(dtype)
    whole = torch.empty(100, 192, dtype=dtype)
    graph.run([states], [whole])
    exact = states.double() @ (codes * scales).double().T
    assert float((whole - exact).abs().mean() / exact.std()) < 0.01
    for count in (1, 2, 3, 4, 5, 8, 16, 31, 32, 33, 64, 65):
        out = torch.empty(count, 192, dtype=dtype)
        graph.run([states[-count:].clone()], [out])
        assert torch.equal(out, whole[-count:]), count


@pytest.mark.parametrize("keys", [300, 512, 513, 1024, 1025, 2100])
def test_products_of_the_library_sum_in_order_within_chunks(keys: int) -> None:
    """What `places.py` builds on: zeros between the others change no bit, as long as nothing crosses into a chunk."""
    rows, width = ov.opset13.parameter([-1, 3, -1, -1], ov.Type.f32), 64
    values = ov.opset13.parameter([-1, 3, -1, width], ov.Type.f32)
    graph = CompiledGraph(ov.Model([ov.opset13.matmul(rows, values, False, False)], [rows, values]), torch.float32)
    generator = torch.Generator().manual_seed(keys)
    chunk = keys if keys <= 512 else 512 if keys <= 1024 else 1024
    first = (keys - 1) // chunk * chunk
    for count in (3, 9, 33, 96):
        weights = torch.rand(1, 3, 3, keys, generator=generator) ** 4
        weights[..., first + 1 : keys : 2] = 0  # gaps in the last chunk
        seen = torch.randn(1, 3, keys, width, generator=generator)
        closed, moved = torch.zeros_like(weights), torch.zeros_like(seen)
        kept = [*range(first), *range(first, keys, 2)]
        closed[..., : len(kept)], moved[:, :, : len(kept)] = weights[..., kept], seen[:, :, kept]
        beside = torch.rand(1, 3, count, keys, generator=generator)
        beside[:, :, -3:] = closed
        out, other = torch.empty(1, 3, 3, width), torch.empty(1, 3, count, width)
        graph.run([weights, seen], [out])
        graph.run([beside, moved], [other])
        assert torch.equal(out, other[:, :, -3:])
