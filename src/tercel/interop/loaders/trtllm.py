"""TensorRT-LLM's eyes (PyTorch backend, 1.4): `_torch/models/modeling_speculative.py`, `_torch/speculative/eagle3.py`
and the YAML that tells it which layers to capture."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

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
)

OPTIONS = "trtllm.yaml"


def view_trtllm(folder: Path, num_layers: int) -> EngineView:
    """The head with the options file that lies in its folder; without one TensorRT-LLM takes its default layers."""
    config, tensors = read_config("TensorRT-LLM", folder), read_tensors("TensorRT-LLM", folder)
    if "draft_vocab_size" not in config:
        raise TercelError("TensorRT-LLM does not see an EAGLE-3 head in a config.json without draft_vocab_size")
    architecture = str((config.get("architectures") or [""])[0]).replace("Eagle3", "")
    if architecture != "LlamaForCausalLM":
        raise TercelError(f"TensorRT-LLM has no EAGLE-3 model for architecture {architecture!r}")
    layers = _layers(folder, num_layers)
    if len(layers) < 2:
        raise TercelError("TensorRT-LLM builds no fc for a single captured layer")
    sizes = llama_sizes("TensorRT-LLM", config, len(layers), config["draft_vocab_size"] or config["vocab_size"])
    check_captured("TensorRT-LLM", layers, sizes.features, num_layers)
    if sizes.features * sizes.target_hidden == sizes.hidden:
        raise TercelError("TensorRT-LLM leaves out fc where the captured layers together are as wide as the head")
    eagle = config.get("eagle_config") or {}
    if eagle.get("next_layer_regular") is False or eagle.get("eh_proj_before_attn", False):
        raise TercelError("eagle_config asks TensorRT-LLM for another layer than EAGLE-3's")
    flags = {
        "norm_before_residual": False,  # the layer has no such option
        "norm_before_fc": bool(eagle.get("norm_before_fc", False)),  # only there, not at the top level
        "norm_output": bool(eagle.get("return_hidden_post_norm", False) or config.get("norm_output", False)),
        "fc_norm": bool(config.get("fc_norm", False)),
    }
    own = sizes.hidden != sizes.target_hidden
    bias = bool(config.get("attention_bias", False))
    wanted = shapes(
        sizes,
        qkv_bias=bias,
        output_bias=bias,
        fc_norm=flags["fc_norm"],
        input_norm=flags["norm_before_fc"],
        embeddings=own,
    )
    placed = place("TensorRT-LLM", _renamed(tensors), wanted)
    if placed.missing and placed.missing != ("lm_head.weight",):
        raise TercelError(f"TensorRT-LLM stops because the file has no {placed.missing[0]}")
    pruned = sizes.draft_vocab != sizes.vocab
    if pruned and "d2t" not in tensors:
        raise TercelError("TensorRT-LLM stops because a head with a draft vocabulary has no d2t")
    used = {"d2t"} if pruned else set()
    return EngineView(
        engine="trtllm",
        sizes=sizes,
        layers=layers,
        weights=placed.weights,
        flags=flags,
        d2t=check_map("TensorRT-LLM", tensors["d2t"], sizes) if pruned else None,
        embeddings="own" if own else "target",
        rope=_rope(config),
        random=placed.missing,
        skipped=tuple(name for name in placed.left_over if name not in used),
    )


def _layers(folder: Path, num_layers: int) -> tuple[int, ...]:
    """`eagle3_layers_to_capture`, a set of layers whose outputs are kept, in the order of the layers."""
    file = folder / OPTIONS
    ids = None
    if file.is_file():
        try:
            options = yaml.safe_load(file.read_text(encoding="utf-8"))["speculative_config"]
            kind, ids = options["decoding_type"], options.get("eagle3_layers_to_capture")
        except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
            raise TercelError(f"TensorRT-LLM cannot use {file} ({error}); export the head again") from error
        if kind not in ("Eagle", "Eagle3"):
            raise TercelError(f"{file} asks TensorRT-LLM for decoding_type {kind!r}, not Eagle3")
    outputs = (1, num_layers // 2 - 1, num_layers - 4) if ids is None else tuple(sorted(set(ids)))
    return tuple(i + 1 for i in outputs)


def _renamed(tensors: dict[str, Tensor]) -> list[tuple[str, str, Tensor]]:
    return [(name, re.sub(r"^layers\.0\.", "midlayer.", name), tensor) for name, tensor in tensors.items()]


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """`RopeParams.from_config`: `rope_theta` and `rope_scaling`; it does not know `rope_parameters`."""
    scaling = dict(config.get("rope_scaling") or {})
    kind = scaling.pop("type", None) or scaling.get("rope_type") or "default"
    return {**scaling, "rope_type": kind, "rope_theta": config.get("rope_theta", 10000.0)}
