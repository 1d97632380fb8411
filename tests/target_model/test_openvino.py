"""Graphs of OpenVINO give what the reference gives, or the reference is used."""

from __future__ import annotations

import sys
import weakref
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("openvino", reason="openvino is not installed: pip install 'tercel[openvino]'")

import openvino as ov

from tercel.decode.eagle3 import Eagle3
from tercel.decode.engine import Engine
from tercel.decode.sampling import SamplingParams
from tercel.decode.types import Request
from tercel.decode.vanilla import Vanilla
from tercel.draft.shape import TreeShape
from tercel.errors import TercelError
from tercel.target_model import backends
from tercel.target_model.model import Target
from tercel.target_model.openvino import artefacts, blocks, graph, places, runtime
from tercel.target_model.openvino import cache as slots
from tercel.target_model.output import TargetOutput
from tercel.target_model.prefill import prefill
from tercel.target_model.sources import Source
from tests.decode.drafts import Oracle, random_draft
from tests.tiny import VOCAB, tiny_model, tiny_tokenizer

# grouped heads and a window, plain heads with learned positions, capped scores, attention that takes no function
ARCHS = ("llama", "gemma3", "gpt2", "gemma2", "falcon")
LAYERS = (0, 1, 2)


def reference_of(
    arch: str, dtype: torch.dtype = torch.float32, weights: str | None = None, **overrides: object
) -> Target:
    model = tiny_model(arch, **{"num_hidden_layers": 3, **overrides}).to(dtype)
    return Target(model, tiny_tokenizer(), Source(arch, arch, "folder", None), weights=weights)


def on_openvino(reference: Target) -> Target:
    notes: list[str] = []
    target = backends.with_backend(reference, "openvino", keep=False, say=notes.append)
    assert target.backend == "openvino", notes
    return target


@cache
def pair(arch: str, positions: int = 256) -> tuple[Target, Target]:
    reference = reference_of(arch, max_position_embeddings=positions)
    return reference, on_openvino(reference)


def some_tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(4, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def tree_of(nodes: int) -> tuple[Tensor, Tensor]:
    """Depths `[T]` and ancestor mask `[T, T]` of a tree whose best path is no prefix of it."""
    seen = torch.eye(nodes, dtype=torch.bool)
    for node in range(1, nodes):
        seen[node] |= seen[(node - 1) // 2]
    return seen.sum(-1) - 1, seen


def same(ours: TargetOutput, truth: TargetOutput) -> None:
    for mine, wanted in zip((ours.hidden, *ours.layers), (truth.hidden, *truth.layers), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-5 * max(10.0, float(wanted.abs().max())))


class Both:
    """The same calls to the reference and to the graph, with a cache each; what they give is compared."""

    def __init__(self, arch: str, rows: int, positions: int = 256) -> None:
        self.targets = pair(arch, positions)
        self.caches = [target.new_cache(rows, 64) for target in self.targets]

    def prefill(self, prompts: list[list[int]], rows: list[int], chunk: int = 512) -> None:
        outs = [
            prefill(target, prompts, cache, rows, LAYERS, chunk)
            for target, cache in zip(self.targets, self.caches, strict=True)
        ]
        for truth, ours in zip(*outs, strict=True):
            same(ours, truth)

    def tree(self, rows: list[int], nodes: int, paths: list[list[int]], seed: int = 0) -> None:
        depths, seen = tree_of(nodes)
        tokens = some_tokens(len(rows), nodes, seed=seed)
        positions = torch.stack([depths + self.caches[0].lengths[row] for row in rows])
        mask = seen.expand(len(rows), -1, -1)
        outs = [
            target.forward(tokens, positions, cache, mask, LAYERS, rows)
            for target, cache in zip(self.targets, self.caches, strict=True)
        ]
        same(outs[1], outs[0])
        torch.testing.assert_close(
            *(target.logits(out.hidden) for target, out in zip(self.targets, outs, strict=True)), rtol=1e-3, atol=1e-3
        )
        for each in self.caches:
            each.keep(paths)
        assert self.caches[0].lengths == self.caches[1].lengths


def test_its_makers_are_told_nothing() -> None:
    assert sys.modules["openvino_telemetry"] is None


@pytest.mark.parametrize("arch", ARCHS)
def test_ragged_rows_in_chunks_and_trees_are_the_references(arch: str) -> None:
    both = Both(arch, 3)
    both.prefill([some_tokens(n, seed=n).tolist() for n in (13, 3, 9)], [0, 1, 2], chunk=6)
    both.tree([0, 1, 2], 7, [[0, 2, 6], [0], []])
    both.tree([0, 1, 2], 7, [[0, 1], [0, 2], [0, 1, 4]], seed=1)
    both.tree([1], 1, [[0]])


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_contexts_of_several_chunks_are_the_references(arch: str) -> None:
    """Prompts that end in the first chunk of slots, behind its border, and in the third; then trees, also over it."""
    lengths = (381, 403, 1187, 20)
    both = Both(arch, len(lengths), 2048)
    both.prefill([some_tokens(n, seed=n).tolist() for n in lengths], list(range(len(lengths))), chunk=300)
    for seed in range(3):
        both.tree([0, 1, 2, 3], 7, [[0, 2, 6], [0, 1, 4], [0, 1], [0]], seed=seed)


def test_rows_join_leave_and_grow_past_the_room_there_was() -> None:
    both = Both("llama", 1)
    both.prefill([some_tokens(slots.STEP - 2).tolist()], [0])
    for each in both.caches:
        each.add_rows(2, 64)
    both.prefill([some_tokens(n, seed=n).tolist() for n in (5, 8)], [1, 2])
    both.tree([0, 2], 5, [[0, 2], [0, 1, 4]])  # rows that do not lie side by side; the first needs more slots
    both.tree([0, 1, 2], 5, [[0, 1], [0], [0, 2]], seed=1)
    for each in both.caches:
        each.select_rows([2, 1])
    both.tree([0, 1], 3, [[0, 2], [0]], seed=2)
    for each in both.caches:
        each.select_rows([1])
        each.add_rows(1)
    both.prefill([some_tokens(4, seed=4).tolist()], [1])
    both.tree([0, 1], 3, [[0], [0]], seed=3)


def test_a_path_outside_the_block_is_refused_and_nothing_of_it_kept() -> None:
    target = pair("llama")[1]
    cache = target.new_cache(2, 8)
    prefill(target, [[5, 6], [7, 8]], cache)
    target.forward(some_tokens(2, 3), torch.tensor([[2, 3, 4]] * 2), cache)
    with pytest.raises(TercelError, match="leaves the block of 3 tokens"):
        cache.keep([[0, 1], [0, 3]])
    assert cache.lengths == [2, 2]


PROMPTS = [tuple(range(5, 5 + n)) for n in (5, 12, 3, 30)]


def texts(target: Target, proposer, slots: int, **params) -> list[tuple[int, ...]]:
    asked = [
        Request(p, SamplingParams(**{"max_new_tokens": 20, "seed": 3, "ignore_eos": True, **params})) for p in PROMPTS
    ]
    return [result.tokens for result in Engine(target, proposer, slots=slots).generate(asked)]


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}], ids=["greedy", "sampled"])
def test_the_loop_gives_the_references_text(params: dict[str, float]) -> None:
    reference, target = pair("llama")
    truth = texts(reference, Vanilla(), 1, **params)
    draft = random_draft(target)
    answers = dict(zip(PROMPTS, truth, strict=True))
    oracle = Oracle(answers)
    assert texts(target, Vanilla(), 3, **params) == truth
    assert texts(target, Eagle3(draft, target, TreeShape(5, 3, 12)), 3, **params) == truth
    assert texts(target, Eagle3(draft, target, TreeShape.chain(3)), 1, **params) == truth
    assert texts(target, oracle, 2, **params) == truth


def test_bfloat16_is_near_the_reference() -> None:
    reference = reference_of("llama", torch.bfloat16)
    target = on_openvino(reference)
    cache = target.new_cache(1, 16)
    (out,) = prefill(target, [[5, 6, 7]], cache, capture=(1, 3))
    assert {out.hidden.dtype, *(layer.dtype for layer in out.layers)} == {torch.bfloat16}
    assert target.logits(out.hidden).dtype == torch.bfloat16
    assert torch.equal(out.layers[1], out.hidden)  # the input of the output layer


def test_layers_are_captured_that_nobody_asked_for_before() -> None:
    reference = reference_of("llama", num_hidden_layers=4)
    target = on_openvino(reference)
    runs = [prefill(t, [[5, 6, 7, 8]], t.new_cache(1, 8), capture=(3, 1, 1))[0] for t in (reference, target)]
    same(runs[1], runs[0])
    with pytest.raises(TercelError, match="layer 5 is out of range"):
        target.forward(torch.tensor([[5]]), torch.tensor([[0]]), target.new_cache(1, 8), capture=(5,))


def test_a_graph_is_converted_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference, notes = reference_of("llama"), []
    backends.with_backend(reference, "openvino", say=notes.append)
    assert [note.split(" of ")[0] for note in notes] == ["building the OpenVINO graph"] * 2

    def again(*_: object) -> None:
        raise AssertionError("converted again")

    monkeypatch.setattr(blocks, "convert_decoder", again)
    monkeypatch.setattr(blocks, "convert_output", again)
    assert backends.with_backend(reference, "openvino", say=notes.append).backend == "openvino"
    assert len(notes) == 2
    assert len(list((cache / "openvino").glob("[!.]*"))) == 2


def test_a_graph_that_cannot_be_written_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(model: object, path: Path, **_: object) -> None:
        path.write_text("half")
        raise RuntimeError("no space left")

    monkeypatch.setattr(artefacts.ov, "save_model", full)
    notes: list[str] = []
    target = backends.with_backend(reference_of("llama"), "openvino", say=notes.append)
    assert target.backend == "torch"
    assert "is computed by torch" in notes[-1]
    assert "no space left" in notes[-1]
    assert [p for p in cache.rglob("*") if p.is_file()] == []


@pytest.mark.parametrize(("dtype", "sharper"), [(torch.float32, 1.002), (torch.bfloat16, 1.2)])
def test_a_graph_that_computes_something_else_is_not_used(
    dtype: torch.dtype, sharper: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = graph.ordered_attention

    def sharpened(module, query, key, value, attention_mask, scaling=None, **kwargs):
        return right(module, query, key, value, attention_mask, scaling=sharper * scaling, **kwargs)

    monkeypatch.setattr(graph, "ordered_attention", sharpened)
    notes: list[str] = []
    assert (
        backends.with_backend(reference_of("llama", dtype), "openvino", keep=False, say=notes.append).backend == "torch"
    )
    assert "differ from the reference's" in notes[-1]


def test_a_graph_that_shows_siblings_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    right = graph.ordered_attention

    def all_seeing(module, query, key, value, attention_mask, **kwargs):
        return right(module, query, key, value, 0 * attention_mask, **kwargs)

    monkeypatch.setattr(graph, "ordered_attention", all_seeing)
    notes: list[str] = []
    assert backends.with_backend(reference_of("llama"), "openvino", keep=False, say=notes.append).backend == "torch"
    assert "siblings see each other" in notes[-1]


def test_a_graph_that_shows_slots_without_a_token_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "NOWHERE", 1 << 40)  # which OpenVINO takes for zero
    notes: list[str] = []
    places._known.cache_clear()
    try:
        reference = reference_of("llama", max_position_embeddings=512)
        assert backends.with_backend(reference, "openvino", keep=False, say=notes.append).backend == "torch"
    finally:
        places._known.cache_clear()
    assert "slots of the cache that hold no token" in notes[-1]


@pytest.mark.parametrize(
    ("reference", "why"),
    [
        (lambda: reference_of("mixtral"), "experts"),
        (lambda: reference_of("llama", torch.float16), "not float16"),
        (lambda: reference_of("mamba"), "can verify a tree"),
        (lambda: reference_of("llama", max_position_embeddings=16), "too short to check"),
    ],
    ids=["experts", "float16", "steps", "short"],
)
def test_what_no_graph_can_be_made_of_stays_with_torch(reference, why: str) -> None:
    notes: list[str] = []
    assert backends.with_backend(reference(), "openvino", keep=False, say=notes.append).backend == "torch"
    assert len(notes) == 1
    assert "is computed by torch: " in notes[0]
    assert why in notes[0]


def test_sizes_that_come_again_have_graphs_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    often = 4
    instance = runtime._Instance
    monkeypatch.setattr(runtime, "_Instance", lambda *args: made.append(args) or instance(*args))
    states = ov.opset13.parameter([-1, 4], ov.Type.f32)
    graph = runtime.CompiledGraph(ov.Model([ov.opset13.exp(states)], [states]), torch.float32, spare=2, often=often)

    def run(rows: int, times: int = 1, sizes: bool = True) -> int:
        for _ in range(times):
            given, out = torch.randn(rows, 4), torch.empty(rows, 4)
            graph.run([given], [out], rows if sizes else None)
            torch.testing.assert_close(out, given.exp())
        return len(made)

    assert run(3, 2 * often, sizes=False) == 1
    assert run(5, often - 1) == 1
    assert run(5) == 2
    assert run(6, often) == 3
    run(5)
    assert run(7, 4 * often - 1) == 3  # one would have to give way
    assert run(7) == 4  # in the place of that for 6 rows
    assert list(graph._own) == [5, 7]
    assert run(6, often - 1) == 4
    assert list(graph._own) == [5, 7]
    graph.run([torch.randn(9, 4)], [torch.empty(9, 4)], 9, 1)  # none is given up for what came once
    assert list(graph._own) == [5, 7]


def test_graphs_keep_nothing_alive_of_what_went_through_them() -> None:
    states = ov.opset13.parameter([-1, 4], ov.Type.f32)
    graph = runtime.CompiledGraph(ov.Model([ov.opset13.exp(states)], [states]), torch.float32, spare=2, often=1)
    for rows in (3, 5, 3, 5, 7):  # each in a graph of its own, the last in that for all
        given, out = torch.randn(rows, 4), torch.empty(rows, 4)
        gone = weakref.ref(given), weakref.ref(out)
        graph.run([given], [out], rows)
        torch.testing.assert_close(out, given.exp())
        del given, out
        assert [tensor() for tensor in gone] == [None, None]
    assert len(graph._own) == 2


@pytest.mark.parametrize("same", [True, False], ids=["same bits", "other bits"])
def test_sizes_are_compiled_in_where_that_changes_no_bit(same: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "_same_bits", lambda one, other: torch.equal(one, other) and same)
    states, past = (ov.opset13.parameter([-1, 4], ov.Type.f32) for _ in range(2))
    model = ov.Model([ov.opset13.matmul(states, past, False, True)], [states, past])
    graph = runtime.CompiledGraph(model, torch.float32, spare=2, often=2, growing={1: 0})
    for length in (3, 3, 3, 5):
        states, past, out = torch.randn(2, 4), torch.randn(length, 4), torch.empty(2, length)
        graph.run([states, past], [out], "two rows")
        torch.testing.assert_close(out, states @ past.T)
    (own,) = graph._own.values()
    shapes = [port.partial_shape.to_string() for port in own._request.get_compiled_model().inputs]
    assert shapes == (["[2,4]", "[?,4]"] if same else ["[?,4]", "[?,4]"])


def test_torch_has_one_thread_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    reference, target = pair("llama")
    counts = [3]
    monkeypatch.setattr(torch, "get_num_threads", lambda: counts[-1])
    monkeypatch.setattr(torch, "set_num_threads", counts.append)
    with reference.beside():
        pass
    assert counts == [3]
    with target.beside():
        assert counts[-1] == 1
    assert counts[-1] == 3


def test_auto_takes_openvino_for_models_that_are_worth_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    reference, notes = pair("llama")[0], []
    assert backends.with_backend(reference, "auto") is backends.with_backend(reference, "torch") is reference
    monkeypatch.setattr(backends, "SMALL", 1000)
    assert backends.with_backend(reference, "auto", keep=False).backend == "openvino"
    steps = reference_of("mamba")
    assert backends.with_backend(steps, "auto", say=notes.append) is steps
    monkeypatch.setattr(backends, "available_memory", lambda device: 100_000)
    assert backends.with_backend(reference, "auto", say=notes.append) is reference
    assert notes == []
    assert backends.with_backend(reference, "openvino", say=notes.append) is reference
    assert "of which 0.0 are left" in notes[0]
    monkeypatch.setattr(backends, "find_spec", lambda name: None)
    assert backends.with_backend(reference, "auto", say=notes.append) is reference
    assert len(notes) == 1


def test_backends_that_are_not_there_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = pair("llama")[0]
    with pytest.raises(TercelError, match="there is no backend tpu"):
        backends.with_backend(reference, "tpu")
    monkeypatch.setattr(backends, "find_spec", lambda name: None)
    with pytest.raises(TercelError, match="pip install 'tercel\\[openvino\\]'"):
        backends.with_backend(reference, "openvino")
