"""OpenVINO's eyes: the head's model in optimum-intel (`exporters/openvino/model_patcher.py`, 2.2) and GenAI's
`eagle3_model_transforms.cpp` (2026.4), which moves `fc` to the target and shares the target's embeddings."""

from __future__ import annotations

import json
from pathlib import Path

from tercel.errors import TercelError
from tercel.interop.loaders.parts import (
    EngineView,
    check_captured,
    check_map,
    llama_sizes,
    place,
    read_config,
    read_tensors,
    shapes,
    transformers_rope,
)

LAYERS = "openvino.json"


def view_openvino(folder: Path, num_layers: int) -> EngineView:
    """The head after optimum-intel's conversion, with the layers that `openvino.json` has one put into its runtime
    info; without that, GenAI takes the outputs of layers `2`, `L//2`, `L-3`."""
    config, tensors = read_config("OpenVINO", folder), read_tensors("OpenVINO", folder)
    architecture = (config.get("architectures") or [None])[0]
    if architecture not in ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"):
        raise TercelError(f"optimum-intel has no draft model {architecture!r}; it wants ['LlamaForCausalLMEagle3']")
    if config.get("draft_vocab_size") is None:
        raise TercelError("optimum-intel stops without draft_vocab_size in config.json")
    sizes = llama_sizes("OpenVINO", config, 3, config["draft_vocab_size"])
    if sizes.hidden != sizes.target_hidden:
        raise TercelError("optimum-intel traces a head with features of the head's own width; this one's differ")
    layers = _layers(folder, num_layers)
    check_captured("OpenVINO", layers, 3, num_layers)
    wanted = shapes(sizes, output_bias=bool(config.get("attention_bias", False)))
    maps = {"d2t": (sizes.draft_vocab,), "t2d": (sizes.vocab,)}
    # transformers puts names without `model.` under it by itself
    named = [(name, name.removeprefix("model."), tensor) for name, tensor in tensors.items()]
    placed = place("OpenVINO", named, {**wanted, **maps})
    d2t = placed.weights.pop("d2t", None)
    placed.weights.pop("t2d", None)
    return EngineView(
        engine="openvino",
        sizes=sizes,
        layers=layers,
        weights=placed.weights,
        flags=dict.fromkeys(("norm_before_residual", "norm_before_fc", "norm_output", "fc_norm"), False),
        d2t=check_map("OpenVINO", d2t, sizes) if d2t is not None else None,
        embeddings="target",
        rope=transformers_rope(config),
        random=placed.missing,
        skipped=placed.left_over,
    )


def _layers(folder: Path, num_layers: int) -> tuple[int, ...]:
    file = folder / LAYERS
    outputs: list[int] = [2, num_layers // 2, num_layers - 3]
    if file.is_file():
        try:
            outputs = json.loads(file.read_text(encoding="utf-8"))["hidden_layers_list"]
        except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
            raise TercelError(f"{file} names no hidden_layers_list ({error}); export the head again") from error
    if len(outputs) != 3:
        raise TercelError(f"OpenVINO GenAI captures exactly three layers, not {len(outputs)}")
    # nodes are found by walking the graph, so in the order of the layers
    return tuple(sorted(i + 1 for i in outputs))
