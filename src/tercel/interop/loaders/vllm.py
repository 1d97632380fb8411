"""vLLM's eyes: `model_executor/models/llama_eagle3.py`, `transformers_utils/configs/speculators`, and
`GPUModelRunner._get_eagle3_aux_layers_from_config` (0.32)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from tercel.errors import TercelError
from tercel.interop.loaders.parts import (
    EngineView,
    Named,
    check_captured,
    check_map,
    default_inputs,
    llama_sizes,
    place,
    read_config,
    read_tensors,
    shapes,
    transformers_rope,
)

ARCHITECTURES = ("LlamaForCausalLM", "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")


def view_vllm(folder: Path, num_layers: int) -> EngineView:
    """A folder given as the draft model; vLLM takes both formats there."""
    config = read_config("vLLM", folder)
    if config.get("speculators_config") is not None:
        return view_speculators(folder, num_layers)
    architectures = config.get("architectures") or [None]
    if config.get("model_type") != "llama" or architectures[0] not in ARCHITECTURES:
        raise TercelError(
            f"vLLM does not know {config.get('model_type')!r} {architectures[0]!r} in {folder / 'config.json'} as an "
            "EAGLE-3 head; architectures must be ['LlamaForCausalLMEagle3'] and model_type llama"
        )
    return _load("vllm", config, read_tensors("vLLM", folder), num_layers)


def view_speculators(folder: Path, num_layers: int) -> EngineView:
    """A folder given as the model itself: its configuration is translated first."""
    config = _translated(read_config("vLLM", folder), folder)
    return _load("speculators", config, read_tensors("vLLM", folder), num_layers)


def _translated(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """`SpeculatorsConfig.validate_speculators_config` and `update_eagle3`."""
    where = folder / "config.json"
    try:
        spec = config["speculators_config"]
        spec["proposal_methods"][0]["speculative_tokens"]
        verifier = spec["verifier"]["name_or_path"]
        kind = config["speculators_model_type"]
    except (KeyError, IndexError, TypeError) as error:
        raise TercelError(f"vLLM refuses {where}: its speculators_config is incomplete ({error})") from error
    if kind != "eagle3":
        raise TercelError(f"vLLM takes {where} for a speculator of type {kind!r}, not eagle3")
    if not verifier:
        raise TercelError(f"vLLM finds no verifier in {where}; `vllm serve` on this folder needs the target's name")
    if config.get("model_type") not in (None, "speculators"):
        raise TercelError(
            f"{where} has a model_type beside its speculators_config, so vLLM does not translate it; remove the key"
        )
    layer = config.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise TercelError(f"vLLM refuses {where}: transformer_layer_config is missing")
    if layer.get("model_type", "llama") != "llama":
        raise TercelError(f"{where} has a {layer['model_type']} layer; only llama layers are EAGLE-3 heads here")
    flat = dict(layer)
    flat["draft_vocab_size"] = config.get("draft_vocab_size")
    if config.get("target_hidden_size") is not None:
        flat["target_hidden_size"] = config["target_hidden_size"]
    # vLLM's own default here is True, unlike that of the library whose format it is
    flat["norm_before_residual"] = config.get("norm_before_residual", True)
    for name in ("norm_before_fc", "fc_norm", "norm_output"):
        flat[name] = config.get(name, False)
    if config.get("eagle_aux_hidden_state_layer_ids"):
        flat["eagle_aux_hidden_state_layer_ids"] = config["eagle_aux_hidden_state_layer_ids"]
    return flat


def _load(engine: str, config: dict[str, Any], tensors: Named, num_layers: int) -> EngineView:
    eagle = config.get("eagle_config") or {}
    if not eagle.get("use_aux_hidden_state", True):
        raise TercelError("eagle_config says use_aux_hidden_state false, so vLLM would give the head no fused features")
    nested = eagle.get("eagle_aux_hidden_state_layer_ids")
    # a plain list, taken as the inputs to capture; sorted and without doubles when the target is told
    ids = config.get("eagle_aux_hidden_state_layer_ids") or nested
    layers = tuple(sorted(set(ids))) if ids else default_inputs(num_layers)
    features = config.get("num_aux_hidden_states") or (len(nested) if nested else 3)  # only the nested list counts
    check_captured("vLLM", layers, features, num_layers)
    vocab = config.get("vocab_size", 32000)
    sizes = llama_sizes("vLLM", config, features, config.get("draft_vocab_size") or vocab, deep=True)
    flags = {
        "norm_before_residual": bool(config.get("norm_before_residual", False)),
        "norm_before_fc": bool(eagle.get("norm_before_fc", config.get("norm_before_fc", False))),
        "norm_output": bool(config.get("norm_output", False)),
        "fc_norm": bool(config.get("fc_norm", False)),
    }
    bias = bool(config.get("attention_bias", False) or config.get("bias", False))
    wanted = shapes(
        sizes,
        qkv_bias=bool(config.get("attention_bias", False)),
        output_bias=bias,
        fc_norm=flags["fc_norm"],
        input_norm=flags["norm_before_fc"],
        embeddings=True,
    )
    named, d2t, skipped = _renamed(tensors, flags["norm_before_fc"])
    placed = place("vLLM", named, wanted)
    if placed.left_over:
        raise TercelError(f"vLLM stops at {placed.left_over[0]}: it builds no such parameter for this config")
    if d2t is not None and sizes.draft_vocab == vocab:
        raise TercelError("vLLM stops at d2t: a head with the target's whole vocabulary has no such parameter there")
    random = set(placed.missing)
    # without embeddings of its own a head takes the target's, where their width allows it
    own = "embed_tokens.weight" in placed.weights or sizes.hidden != sizes.target_hidden
    if not own:
        random.discard("embed_tokens.weight")
    if "lm_head.weight" in random and sizes.draft_vocab != vocab:
        raise TercelError("vLLM would take the target's lm_head, as the file has none, but the vocabularies differ")
    return EngineView(
        engine=engine,
        sizes=sizes,
        layers=layers,
        weights=placed.weights,
        flags=flags,
        d2t=check_map("vLLM", d2t, sizes) if d2t is not None else None,
        embeddings="own" if own else "target",
        rope=transformers_rope(config),
        random=tuple(sorted(random)),
        skipped=skipped,
    )


def _renamed(
    tensors: Named, norm_before_fc: bool
) -> tuple[list[tuple[str, str, Tensor]], Tensor | None, tuple[str, ...]]:
    """`Eagle3LlamaForCausalLM.load_weights`: names by containment, `midlayer.` and `layers.0.` the same."""
    named, skipped, d2t = [], [], None
    for name, tensor in tensors.items():
        if "t2d" in name or "mask_hidden" in name or ("input_norm." in name and not norm_before_fc):
            skipped.append(name)
        elif "d2t" in name:
            d2t = tensor
        else:
            named.append((name, name.replace("layers.0.", "midlayer."), tensor))
    return named, d2t, tuple(skipped)
