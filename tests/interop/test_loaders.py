"""The second readers: faults planted into exported folders, one for each trap, and the chain they compute."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tercel.errors import TercelError
from tercel.interop.engines import find
from tercel.interop.loaders import draft_logits, frequencies_of
from tercel.interop.proof import prove
from tests.interop.export_worlds import (
    DEPTH,
    LLAMA3,
    change_config,
    change_tensors,
    draft,
    export,
    random_like,
)
from tests.tiny import VOCAB

Fault = Callable[[Path], None]


def config(change: Callable[[dict[str, Any]], Any]) -> Fault:
    return lambda folder: change_config(folder, change)


def tensors(change: Callable[[dict[str, Any]], Any]) -> Fault:
    return lambda folder: change_tensors(folder, change)


def without_layers(folder: Path) -> None:
    file = folder / "trtllm.yaml"
    options = yaml.safe_load(file.read_text())
    del options["speculative_config"]["eagle3_layers_to_capture"]
    file.write_text(yaml.safe_dump(options))


def shift(ids: list[int], by: int) -> list[int]:
    return [i + by for i in ids]


IDS = "eagle_aux_hidden_state_layer_ids"
FAULTS: dict[str, tuple[str, dict[str, Any], Fault, str]] = {
    "vLLM: ids one off": ("vllm", {}, config(lambda c: c.update({IDS: shift(c[IDS], -1)})), "inputs of layers 1, 2, 5"),
    "SGLang: ids as vLLM has them": (
        "sglang",
        {},
        config(lambda c: c["eagle_config"].update({IDS: [2, 3, 6]})),
        "inputs of layers 3, 4, 7",
    ),
    "SGLang: ids at the top only": (
        "sglang",
        {},
        config(lambda c: c.update({IDS: c["eagle_config"].pop(IDS)})),
        "inputs of layers 2, 4, 5",
    ),
    "TensorRT-LLM: no layers named": ("trtllm", {}, without_layers, "inputs of layers 2, 4, 5"),
    "OpenVINO: its default is outputs": (
        "openvino",
        {"feature_layers": (2, 4, 5)},
        lambda folder: (folder / "openvino.json").unlink(),
        "inputs of layers 3, 5, 6",
    ),
    "speculators: norm_before_residual left out": (
        "speculators",
        {},
        config(lambda c: c.pop("norm_before_residual")),
        "norm_before_residual True",
    ),
    "vLLM: norm_before_residual left out": (
        "vllm",
        {"norm_before_residual": True},
        config(lambda c: c.pop("norm_before_residual")),
        "norm_before_residual False",
    ),
    "TensorRT-LLM: norm_before_fc at the top only": (
        "trtllm",
        {"norm_before_fc": True},
        config(lambda c: c["eagle_config"].pop("norm_before_fc")),
        r"not use input_norm\.weight",
    ),
    "norm_output left out": (
        "sglang",
        {"norm_output": True},
        config(lambda c: c.pop("norm_output")),
        "norm_output False",
    ),
    "SGLang: a misnamed tensor": (
        "sglang",
        {},
        tensors(lambda t: t.update({"mid_layer.hidden_norm.weight": t.pop("midlayer.hidden_norm.weight")})),
        "at random values",
    ),
    "vLLM: a misnamed tensor": (
        "vllm",
        {},
        tensors(lambda t: t.update({"mid_layer.hidden_norm.weight": t.pop("midlayer.hidden_norm.weight")})),
        r"stops at mid_layer\.hidden_norm\.weight",
    ),
    "OpenVINO: the names of vLLM": (
        "openvino",
        {},
        tensors(lambda t: t.update({"layers.0.mlp.up_proj.weight": t.pop("midlayer.mlp.up_proj.weight")})),
        "at random values",
    ),
    "vLLM: a tensor missing": ("vllm", {}, tensors(lambda t: t.pop("fc.weight")), "at random values"),
    "vLLM: random embeddings": (
        "vllm",
        {},
        tensors(lambda t: t.update({"embed_tokens.weight": random_like(VOCAB, 16)})),
        r"embed_tokens\.weight",
    ),
    "SGLang: embeddings nobody uses": (
        "sglang",
        {},
        tensors(lambda t: t.update({"embed_tokens.weight": random_like(VOCAB, 16)})),
        r"not use embed_tokens\.weight",
    ),
    "vLLM: d2t missing": ("vllm", {}, tensors(lambda t: t.pop("d2t")), "draft ids for ids of the target"),
    "SGLang: d2t missing": ("sglang", {}, tensors(lambda t: t.pop("d2t")), "draft ids for ids of the target"),
    "TensorRT-LLM: d2t missing": ("trtllm", {}, tensors(lambda t: t.pop("d2t")), "no d2t"),
    "OpenVINO: d2t missing": ("openvino", {}, tensors(lambda t: t.pop("d2t")), "at random values"),
    "d2t of another head": (
        "vllm",
        {},
        tensors(lambda t: t.update(d2t=torch.zeros_like(t["d2t"]))),
        "another draft vocabulary",
    ),
    "d2t holding ids instead of offsets": (
        "sglang",
        {},
        tensors(lambda t: t.update(d2t=t["d2t"] + torch.arange(len(t["d2t"])))),
        "outside the 128 tokens|another draft vocabulary",
    ),
    "vLLM: a map for a whole vocabulary": (
        "vllm",
        {"draft_vocab_size": VOCAB},
        tensors(lambda t: t.update(d2t=torch.zeros(VOCAB, dtype=torch.long))),
        "stops at d2t",
    ),
    "vocabulary sizes mixed up": (
        "vllm",
        {},
        config(lambda c: c.update(vocab_size=c["draft_vocab_size"], draft_vocab_size=c["vocab_size"])),
        "of different heads",
    ),
    "RoPE base changed": (
        "sglang",
        {},
        config(lambda c: c["rope_parameters"].update(rope_theta=10000.0)),
        "would rotate",
    ),
    "TensorRT-LLM: RoPE base under the new name only": (
        "trtllm",
        {},
        config(lambda c: c.pop("rope_theta")),
        "would rotate",
    ),
    "RoPE scaling lost": (
        "trtllm",
        {"rope_parameters": LLAMA3},
        config(lambda c: c.pop("rope_scaling")),
        "would rotate",
    ),
    "epsilon left to the default": ("vllm", {}, config(lambda c: c.pop("rms_norm_eps")), "epsilon 1e-06"),
    "position limit changed": (
        "vllm",
        {},
        config(lambda c: c.update(max_position_embeddings=64)),
        "64 positions, not 512",
    ),
    "speculators: model_type at the top": (
        "speculators",
        {},
        config(lambda c: c.update(model_type="llama")),
        "does not translate",
    ),
    "speculators: five layers in an fc for three": (
        "speculators",
        {"feature_layers": (1, 2, 4, 5, 7)},
        config(lambda c: c["transformer_layer_config"].pop("num_aux_hidden_states")),
        "captures 5 layers, but builds fc for 3",
    ),
    "a weight changed": (
        "vllm",
        {},
        tensors(lambda t: t["midlayer.self_attn.o_proj.weight"].mul_(1.01)),
        r"o_proj\.weight has other values",
    ),
    "fc_norm ignored": ("sglang", {"fc_norm": True}, config(lambda c: c.pop("fc_norm")), r"not use fc_norm\.0"),
    "another architecture": (
        "sglang",
        {},
        config(lambda c: c.update(architectures=["LlamaForCausalLM"])),
        "no model 'LlamaForCausalLM'",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str, tmp_path: Path) -> None:
    engine, overrides, spoil, message = FAULTS[name]
    model, out = draft(**overrides), tmp_path / "out"
    export(model, engine, out)
    prove(model, engine, out)
    spoil(out)
    with pytest.raises(TercelError, match=message):
        prove(model, engine, out)


@pytest.mark.parametrize(
    ("file", "message"),
    [("config.json", "cannot read .*config.json"), ("model.safetensors", "finds no safetensors")],
)
def test_a_folder_without_its_files_is_refused(file: str, message: str, tmp_path: Path) -> None:
    export(draft(), "vllm", tmp_path / "out")
    (tmp_path / "out" / file).unlink()
    with pytest.raises(TercelError, match=message):
        find("vllm").view(tmp_path / "out", DEPTH)
    with pytest.raises(TercelError, match="no engine 'tgi'"):
        find("tgi").view(tmp_path / "out", DEPTH)


def test_vllm_reads_a_folder_of_neither_ids_nor_flags_by_its_defaults(tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(draft(feature_layers=(2, 4, 5)), "vllm", out)

    def bare(values: dict[str, Any]) -> None:
        for name in (IDS, "eagle_config", "num_aux_hidden_states", "norm_before_residual", "fc_norm", "norm_output"):
            values.pop(name, None)

    change_config(out, bare)
    seen = find("vllm").view(out, DEPTH)
    assert seen.layers == (2, 4, 5)
    assert not any(seen.flags.values())
    assert find("vllm").view(out, 30).layers == (2, 15, 27)
    change_config(out, lambda c: c.update({IDS: [2, 4, 9]}))
    with pytest.raises(TercelError, match="input of layer 9"):
        find("vllm").view(out, DEPTH)


def test_vllm_sorts_the_layers_it_captures(tmp_path: Path) -> None:
    export(draft(), "vllm", tmp_path / "out")
    change_config(tmp_path / "out", lambda c: c.update({IDS: [6, 2, 3]}))
    assert find("vllm").view(tmp_path / "out", DEPTH).layers == (2, 3, 6)


@settings(max_examples=20, deadline=None)
@given(flags=st.tuples(*[st.booleans()] * 4), seed=st.integers(0, 100))
def test_the_chain_depends_on_every_flag(flags: tuple[bool, ...], seed: int, tmp_path_factory: Any) -> None:
    before_residual, before_fc, output, bias = flags
    model = draft(
        norm_before_residual=before_residual, norm_before_fc=before_fc, norm_output=output, attention_bias=bias
    )
    out = tmp_path_factory.mktemp("chain") / "out"
    export(model, "vllm", out)
    seen = find("vllm").view(out, DEPTH)
    generator = torch.Generator().manual_seed(seed)
    features, embedded = torch.randn(6, 48, generator=generator), torch.randn(6, 16, generator=generator)
    right = draft_logits(seen, features, embedded, torch.arange(6), 3)
    assert [len(step) for step in right] == [6, 5, 4]
    for name in ("norm_before_residual", "norm_output"):
        flipped = replace(seen, flags={**seen.flags, name: not seen.flags[name]})
        wrong = draft_logits(flipped, features, embedded, torch.arange(6), 3)
        # feeding back the normed output shows from the second step on
        assert not torch.allclose(right[1], wrong[1], atol=1e-3)
    with pytest.raises(TercelError, match="uninitialised"):
        draft_logits(replace(seen, random=("fc.weight",)), features, embedded, torch.arange(6), 1)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 5000.0},
        {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
        LLAMA3,
        {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 128},
    ],
)
def test_frequencies_are_those_of_transformers(rope: dict[str, Any]) -> None:
    like = LlamaConfig(hidden_size=64, num_attention_heads=2, max_position_embeddings=512, rope_parameters=dict(rope))
    theirs = LlamaRotaryEmbedding(like)
    mine, scale = frequencies_of(rope, 32)
    assert torch.allclose(mine, theirs.inv_freq, rtol=1e-5, atol=0)
    assert scale == pytest.approx(theirs.attention_scaling, rel=1e-6)
    with pytest.raises(TercelError, match="'longrope' cannot be checked"):
        frequencies_of({"rope_type": "longrope", "rope_theta": 1e4}, 32)


def test_reports_are_plain_data(tmp_path: Path) -> None:
    report = export(draft(), "vllm", tmp_path / "out")
    values = json.loads(json.dumps(report.to_json()))
    assert values["engine"] == "vllm"
    assert values["files"]["config.json"] > 0
