"""SGLang's eyes: `models/llama_eagle3.py`, `spec_aux_hidden_state.py` and the targets' `set_eagle3_layers_to_capture`
(0.5.23)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tercel.errors import TercelError
from tercel.interop.loaders.parts import (
    EngineView,
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

# targets whose ids are outputs only if the first one is 1 (models/deepseek_v2.py, models/glm4_moe_lite.py)
RAW_UNLESS_ONE = frozenset({"deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "glm4_moe_lite", "glm_moe_dsa"})
_LEGACY = {
    "aux_norm_low": "fc_norm.0",
    "aux_norm_mid": "fc_norm.1",
    "aux_norm_high": "fc_norm.2",
    "layers.0.": "midlayer.",
}


def view_sglang(folder: Path, num_layers: int, target_type: str | None = None) -> EngineView:
    """`target_type` is the `model_type` of the target, which decides how layer ids are meant."""
    config, tensors = read_config("SGLang", folder), read_tensors("SGLang", folder)
    architecture = (config.get("architectures") or [None])[0]
    if architecture != "LlamaForCausalLMEagle3":
        raise TercelError(f"SGLang has no model {architecture!r}; architectures must be ['LlamaForCausalLMEagle3']")
    if config.get("tie_word_embeddings", False):
        raise TercelError("tie_word_embeddings is true, so SGLang would use the embeddings as the head's lm_head")
    eagle = config.get("eagle_config") or {}
    layers = _layers(eagle, num_layers, target_type)
    ids = eagle.get("eagle_aux_hidden_state_layer_ids")
    features = config.get("num_aux_hidden_states") or (len(ids) if ids else 3)
    check_captured("SGLang", layers, features, num_layers)
    vocab = config.get("vocab_size", 32000)
    if "draft_vocab_size" not in config:
        raise TercelError("SGLang stops without draft_vocab_size in config.json")
    sizes = llama_sizes("SGLang", config, features, config["draft_vocab_size"] or vocab)
    if sizes.features * sizes.target_hidden == sizes.hidden:
        raise TercelError("SGLang leaves out fc where the captured layers together are as wide as the head")
    if config.get("bias", False):
        raise TercelError("config.json says bias true, so SGLang would give fc a random bias")
    flags = {
        "norm_before_residual": False,  # the layer has no such option
        "norm_before_fc": bool(eagle.get("norm_before_fc", config.get("norm_before_fc", False))),
        "norm_output": bool(config.get("norm_output", False)),
        "fc_norm": bool(config.get("fc_norm") or config.get("use_aux_norm", False)),
    }
    wanted = shapes(
        sizes,
        output_bias=bool(config.get("attention_bias", False) or config.get("bias", False)),
        fc_norm=flags["fc_norm"],
        input_norm=flags["norm_before_fc"],
        embeddings=True,
    )
    maps = {name: tensor for name, tensor in tensors.items() if "d2t" in name or "t2d" in name}
    named = [(name, _renamed(name), tensor) for name, tensor in tensors.items() if name not in maps]
    placed = place("SGLang", named, wanted)
    d2t = next((tensor for name, tensor in maps.items() if "d2t" in name), None)
    random, skipped = set(placed.missing), [*placed.left_over, *(name for name in maps if "d2t" not in name)]
    own = sizes.hidden != sizes.target_hidden
    if not own:  # loaded, if they are there, and then replaced by the target's
        random.discard("embed_tokens.weight")
        skipped += [name for name, role, _ in named if role == "embed_tokens.weight"]
    if config["draft_vocab_size"] is None:
        random.discard("lm_head.weight")
    weights = {role: tensor for role, tensor in placed.weights.items() if own or role != "embed_tokens.weight"}
    return EngineView(
        engine="sglang",
        sizes=sizes,
        layers=layers,
        weights=weights,
        flags=flags,
        d2t=check_map("SGLang", d2t, sizes) if d2t is not None else None,
        embeddings="own" if own else "target",
        rope=transformers_rope(config),
        random=tuple(sorted(random)),
        skipped=tuple(sorted(skipped)),
    )


def _layers(eagle: dict[str, Any], num_layers: int, target_type: str | None) -> tuple[int, ...]:
    """Ids are outputs of layers; captured in the order of the layers, whatever the order of the list."""
    if not eagle.get("use_aux_hidden_state", True):
        raise TercelError("eagle_config says use_aux_hidden_state false, so SGLang would capture no layers")
    ids = eagle.get("eagle_aux_hidden_state_layer_ids")
    if ids is None:
        return default_inputs(num_layers)
    raw = target_type in RAW_UNLESS_ONE and ids[0] != 1
    return tuple(sorted({i if raw else i + 1 for i in ids}))


def _renamed(name: str) -> str:
    """Old names to roles; what then fits no parameter, with or without `model.`, is skipped without a word."""
    for old, new in _LEGACY.items():
        name = name.replace(old, new)
    return name.removeprefix("model.")
