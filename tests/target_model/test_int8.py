"""A target with int8 weights is the quantised model in all that it computes, whoever computes it."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from tercel.draft import HeadInfo, TargetIdentity
from tercel.draft.misfits import misfits
from tercel.errors import TercelError
from tercel.target_model import backends
from tercel.target_model.model import Target
from tercel.target_model.prefill import prefill
from tercel.target_model.sources import Source
from tests.decode.drafts import random_draft
from tests.tiny import tiny_model, tiny_tokenizer


def target_of(arch: str, weights: str | None, dtype: torch.dtype = torch.float32, **overrides: object) -> Target:
    model = tiny_model(arch, **{"num_hidden_layers": 3, **overrides}).to(dtype)
    return Target(model, tiny_tokenizer(), Source(arch, arch, "folder", None), weights=weights)


@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_matrices_are_whole_multiples_of_a_scale_for_each_output_channel(arch: str) -> None:
    stored, target = target_of(arch, None), target_of(arch, "int8")
    rounded = {id(module.weight) for module in target.int8.modules}
    assert len(rounded) == sum(isinstance(m, nn.Linear | type(target.int8.modules[0])) for m in target.model.modules())
    for (name, before), after in zip(stored.model.named_parameters(), target.model.parameters(), strict=True):
        if id(after) not in rounded:
            assert torch.equal(before, after), name
            continue
        codes, scales = target.int8.codes_of(after.detach())
        assert scales.numel() in after.shape
        assert int(codes.abs().max()) == 127
        torch.testing.assert_close(codes * scales, after.detach())
        assert ((before - after).abs() <= scales / 2 + 1e-6).all(), name
        assert not torch.equal(before, after), name


def test_a_channel_of_zeros_stays_so() -> None:
    model = tiny_model("llama", num_hidden_layers=3)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[3] = 0
    target = Target(model, tiny_tokenizer(), Source("zeros", "zeros", "folder", None), weights="int8")
    assert not target.model.model.layers[0].mlp.up_proj.weight[3].any()


def test_it_is_another_target_and_the_head_of_the_stored_one_is_warned_of() -> None:
    stored, target = target_of("llama", None), target_of("llama", "int8")
    half = target_of("llama", "int8", torch.bfloat16)
    assert target.fingerprint == f"{stored.fingerprint}-int8"
    assert target.is_recorded_as(target.fingerprint)
    assert not target.is_recorded_as(stored.fingerprint)
    assert target.is_rounded_from(stored.fingerprint)
    assert not stored.is_rounded_from(stored.fingerprint)
    assert half.fingerprint.endswith("-int8")
    trained = HeadInfo(TargetIdentity("llama", stored.fingerprint, stored.tokenizer_digest))
    (found,) = misfits(replace(random_draft(stored), info=trained), target)
    assert (found.what, found.severity) == ("weights", "note")
    assert "was trained for llama with its own weights, and here they are int8" in str(found)


@pytest.mark.parametrize(("arch", "weights", "why"), [("mixtral", "int8", "experts"), ("llama", "int3", "int8")])
def test_weights_that_a_model_cannot_have_are_refused(arch: str, weights: str, why: str) -> None:
    with pytest.raises(TercelError, match=why):
        target_of(arch, weights)


def test_the_graph_multiplies_the_whole_numbers_and_gives_what_the_reference_gives() -> None:
    pytest.importorskip("openvino", reason="openvino is not installed: pip install 'tercel[openvino]'")
    from tercel.target_model.openvino.graph import convert_decoder, convert_output

    reference, notes = target_of("llama", "int8", torch.bfloat16), []
    graphs = [
        convert_decoder(reference.stock, (), reference.int8),
        convert_output(reference.output_layer, reference.dtype, reference.int8),
    ]
    kinds = [str(n.get_element_type()) for g in graphs for n in g.get_ordered_ops() if n.get_type_name() == "Constant"]
    assert kinds.count("<Type: 'int8_t'>") == len(reference.int8.modules)
    target = backends.with_backend(reference, "openvino", keep=False, say=notes.append)
    assert target.backend == "openvino", notes
    assert (target.weights, target.fingerprint) == ("int8", reference.fingerprint)
    assert target.work.layers < 0.7 * reference.work.layers
    stored = target_of("llama", None, torch.bfloat16)
    outs = [prefill(t, [[5, 6, 7, 8]], t.new_cache(1, 8))[0].hidden.float() for t in (target, reference, stored)]
    ours, truth, before = outs
    assert float((ours - truth).abs().mean()) < float((before - truth).abs().mean()) * 2
    assert re.search("building the OpenVINO graph", notes[0])


def test_a_graph_that_computes_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openvino", reason="openvino is not installed: pip install 'tercel[openvino]'")
    from tercel.target_model.openvino import graph

    right, notes = graph.ordered_attention, []

    def sharpened(module, query, key, value, attention_mask, scaling=None, **kwargs):
        return right(module, query, key, value, attention_mask, scaling=1.3 * scaling, **kwargs)

    reference = target_of("llama", "int8")
    assert backends.with_backend(reference, "openvino", keep=False, say=notes.append).backend == "openvino", notes
    monkeypatch.setattr(graph, "ordered_attention", sharpened)
    assert backends.with_backend(reference, "openvino", keep=False, say=notes.append) is reference
    assert "is computed by torch: " in notes[-1]
