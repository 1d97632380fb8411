"""Folders as other makers write them, from a tiny head of this package; written out by hand, not with its writers.

Each `write_*` takes keyword changes to the top level of config.json (None removes a key) and gives the folder back.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tercel.draft import DraftModel

LIST = "eagle_aux_hidden_state_layer_ids"


def weights_of(model: DraftModel, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The head's parameters by its own names, as makers store them."""
    return {name: p.detach().to(dtype).clone().contiguous() for name, p in model.head.named_parameters()}


def maps_of(model: DraftModel) -> dict[str, Tensor]:
    return {"d2t": model.vocabulary.d2t.clone(), "t2d": model.vocabulary.t2d.clone()}


def layer_config(model: DraftModel, **more: Any) -> dict[str, Any]:
    """The plain Llama keys that every maker writes."""
    c = model.head.config
    return {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": model.head.config.num_decoder_layers,
        "num_attention_heads": c.num_attention_heads,
        "num_key_value_heads": c.num_key_value_heads,
        "head_dim": c.head_dim,
        "vocab_size": c.vocab_size,
        "rms_norm_eps": c.rms_norm_eps,
        "max_position_embeddings": c.max_position_embeddings,
        "rope_theta": c.rope_parameters["rope_theta"],
        "rope_scaling": None,
        "tie_word_embeddings": False,
        **more,
    }


def write(
    folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], changes: dict[str, Any], pickled: bool = False
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config = {k: v for k, v in {**config, **changes}.items() if v is not None or k not in changes}
    (folder / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    return folder


def write_sglang(model: DraftModel, folder: Path, *, pickled: bool = False, **changes: Any) -> Path:
    """SafeAILab's own heads: `midlayer.*`, both maps, no list of layers; pickles in their first releases."""
    c = model.head.config
    config = layer_config(model, architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=c.draft_vocab_size)
    if c.hidden_size != c.target_hidden_size:
        config["target_hidden_size"] = c.target_hidden_size
    for flag in ("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual", "attention_bias"):
        if getattr(c, flag):
            config[flag] = True
    return write(folder, config, {**weights_of(model), **maps_of(model)}, changes, pickled)


def write_specforge(model: DraftModel, folder: Path, **changes: Any) -> Path:
    """SpecForge: as above; `eagle_config` lists *outputs*, and RoPE stands in both styles."""
    c = model.head.config
    config = layer_config(
        model,
        architectures=["LlamaForCausalLMEagle3"],
        draft_vocab_size=c.draft_vocab_size,
        rope_parameters=dict(c.rope_parameters),
        eagle_config={LIST: [i - 1 for i in c.feature_layers]},
    )
    return write(folder, config, {**weights_of(model, torch.bfloat16), **maps_of(model)}, changes)


def write_speculators(model: DraftModel, folder: Path, **changes: Any) -> Path:
    """speculators: `layers.0.*`, embeddings saved, sizes nested, *input* ids at the top level, maps only if pruned."""
    c = model.head.config
    tensors = {name.replace("midlayer.", "layers.0."): value for name, value in weights_of(model).items()}
    if model.vocabulary.pruned:
        tensors.update(maps_of(model))
    nested = layer_config(model, attention_bias=c.attention_bias)
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}],
            "verifier": {"name_or_path": "someone/target", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": nested,
        "draft_vocab_size": c.draft_vocab_size,
        "target_hidden_size": None,
        "norm_before_residual": c.norm_before_residual,
        "norm_before_fc": c.norm_before_fc,
        "fc_norm": c.fc_norm,
        "norm_output": c.norm_output,
        "embed_requires_grad": False,
        LIST: list(c.feature_layers),
    }
    return write(folder, config, tensors, changes)


def write_modelopt(model: DraftModel, folder: Path, **changes: Any) -> Path:
    """ModelOpt: `layers.0.*`, `d2t` but no `t2d`, `eagle_config` with its switches and *output* ids."""
    c = model.head.config
    tensors = {name.replace("midlayer.", "layers.0."): value for name, value in weights_of(model).items()}
    if model.vocabulary.pruned:
        tensors["d2t"] = model.vocabulary.d2t.clone()
    config = layer_config(
        model,
        architectures=["LlamaForCausalLMEagle3"],
        draft_vocab_size=c.draft_vocab_size,
        rope_scaling={"rope_type": "default", "rope_theta": c.rope_parameters["rope_theta"]},
        eagle_config={
            LIST: [i - 1 for i in c.feature_layers],
            "use_aux_hidden_state": True,
            "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True,
            "use_mtp_layernorm": False,
            "next_layer_regular": True,
            "parallel_draft_step": 1,
            "parallel_draft_heads_num_layers": 1,
        },
    )
    return write(folder, config, tensors, changes)


def write_angelslim(model: DraftModel, folder: Path, **changes: Any) -> Path:
    """AngelSlim: `midlayer.*`, its class's name, *output* ids under a key of its own."""
    c = model.head.config
    config = layer_config(
        model,
        architectures=["Eagle3LlamaForCausalLM"],
        draft_vocab_size=c.draft_vocab_size,
        aux_hidden_states_layer_ids=[i - 1 for i in c.feature_layers],
    )
    return write(folder, config, {**weights_of(model), **maps_of(model)}, changes)


def write_eagle1(model: DraftModel, folder: Path, prefix: str = "", **changes: Any) -> Path:
    """EAGLE-1 and 2: `fc` from `2H`, a plain layer without its first norm, the target's output layer."""
    c = model.head.config
    hidden, mlp, query, key = (
        c.hidden_size,
        c.intermediate_size,
        c.num_attention_heads * c.head_dim,
        c.num_key_value_heads * c.head_dim,
    )
    shapes = {
        "embed_tokens.weight": (c.vocab_size, hidden),
        "fc.weight": (hidden, 2 * hidden),
        "fc.bias": (hidden,),
        "layers.0.self_attn.q_proj.weight": (query, hidden),
        "layers.0.self_attn.k_proj.weight": (key, hidden),
        "layers.0.self_attn.v_proj.weight": (key, hidden),
        "layers.0.self_attn.o_proj.weight": (hidden, query),
        "layers.0.mlp.gate_proj.weight": (mlp, hidden),
        "layers.0.mlp.up_proj.weight": (mlp, hidden),
        "layers.0.mlp.down_proj.weight": (hidden, mlp),
        "layers.0.post_attention_layernorm.weight": (hidden,),
    }
    generator = torch.Generator().manual_seed(0)
    tensors = {prefix + name: 0.15 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return write(folder, layer_config(model, architectures=["LlamaForCausalLM"]), tensors, changes, pickled=True)


def put(folder: Path, values: dict[str, Tensor | None]) -> None:
    """Replace, add or (None) remove tensors of a folder's safetensors file."""
    tensors = {**load_file(folder / "model.safetensors"), **values}
    save_file({k: v for k, v in tensors.items() if v is not None}, folder / "model.safetensors")


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a folder's config.json in place."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    change(config)
    file.write_text(json.dumps(config))


WRITERS: dict[str, Callable[..., Path]] = {
    "sglang": write_sglang,
    "specforge": write_specforge,
    "speculators": write_speculators,
    "modelopt": write_modelopt,
    "angelslim": write_angelslim,
}
