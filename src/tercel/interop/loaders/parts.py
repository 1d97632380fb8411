"""What the views of all engines share: the view itself, the files they read, the sizes they build for.

What a Llama configuration leaves out has transformers' default.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tercel.errors import TercelError

Named = dict[str, Tensor]  # tensors by their name in the file
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Sizes:
    """Numbers an engine builds its modules with. features: how many layers `fc` takes; eps: of the norms; positions: of
    the longest text; layers: of the decoder."""

    hidden: int
    target_hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    draft_vocab: int
    features: int
    eps: float
    positions: int
    layers: int = 1


@dataclass(frozen=True)
class EngineView:
    """What an engine makes of a folder.

    layers: what it would capture of a target of the given depth, as *input of decoder layer i*.
    weights: by role, under the names of the public format (`midlayer.…`), in Hugging Face's layout.
    flags: norm_before_residual, norm_before_fc, norm_output, fc_norm as it would compute.
    d2t: int64 offsets `[W]`; None if draft ids are taken for target ids.
    embeddings: whose it looks tokens up in.
    rope: parameters under transformers' names; `freq_factors` where the file divides the frequencies itself.
    random: roles it would leave uninitialised; skipped: names in the file that it would not use.
    """

    engine: str
    sizes: Sizes
    layers: tuple[int, ...]
    weights: dict[str, Tensor]
    flags: dict[str, bool]
    d2t: Tensor | None
    embeddings: Literal["target", "own"]
    rope: dict[str, Any]
    random: tuple[str, ...]
    skipped: tuple[str, ...]


def read_config(engine: str, folder: Path) -> dict[str, Any]:
    """`config.json` as it stands. Raises `TercelError` if there is none, or it is not a JSON object."""
    file = folder / "config.json"
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise TercelError(f"{engine} cannot read {file} ({error}); export the head again") from error
    if not isinstance(value, dict):
        raise TercelError(f"{engine} cannot use {file}: it is not a JSON object; export the head again")
    return value


def read_tensors(engine: str, folder: Path) -> Named:
    """All tensors of the folder's safetensors files. Raises `TercelError` if there are none or one is damaged."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise TercelError(f"{engine} finds no safetensors file in {folder}; export the head again")
    tensors: Named = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as stored:
                tensors.update({name: stored.get_tensor(name) for name in stored.keys()})  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise TercelError(f"{engine} cannot read {file} ({error}); export the head again") from error
    return tensors


def llama_sizes(
    engine: str, config: dict[str, Any], features: int, draft_vocab: int, *, deep: bool = False
) -> Sizes:
    """Sizes from a Llama configuration. deep: whether the engine builds as many layers as it says, or one. Raises
    `TercelError` where transformers or the engine would refuse it."""
    hidden, heads = int(config.get("hidden_size", 4096)), int(config.get("num_attention_heads", 32))
    if hidden % heads:
        raise TercelError(
            f"{engine} reads the head through transformers' LlamaConfig, which refuses hidden_size {hidden} with "
            f"{heads} attention heads; use a head of a width that its heads divide"
        )
    layers = int(config.get("num_hidden_layers", 32))
    if layers != 1 and not deep:
        raise TercelError(f"{engine} would build {layers} layers; a head has one")
    return Sizes(
        hidden=hidden,
        target_hidden=int(config.get("target_hidden_size") or hidden),
        intermediate=int(config.get("intermediate_size", 11008)),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        vocab=int(config.get("vocab_size", 32000)),
        draft_vocab=draft_vocab,
        features=features,
        eps=float(config.get("rms_norm_eps", 1e-6)),
        positions=int(config.get("max_position_embeddings", 2048)),
        layers=layers,
    )


def transformers_rope(config: dict[str, Any]) -> dict[str, Any]:
    """RoPE as transformers 5 settles it: `rope_scaling` before `rope_parameters`, `rope_theta` only where both lack
    it."""
    rope = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    rope["rope_type"] = rope.get("rope_type") or rope.pop("type", None) or "default"
    rope.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    return rope


def layer_role(number: int) -> str:
    """What the roles of a decoder layer's weights begin with."""
    return f"layers.{number}" if number else "midlayer"


def default_inputs(num_layers: int) -> tuple[int, ...]:
    """What the reference implementation captures, as inputs of layers."""
    return (2, num_layers // 2, num_layers - 3)


def shapes(
    sizes: Sizes,
    *,
    qkv_bias: bool = False,
    output_bias: bool = False,
    fc_norm: bool = False,
    input_norm: bool = False,
    embeddings: bool = False,
) -> dict[str, Shape]:
    """Role to shape of every weight that an engine with these options builds."""
    query, key, h = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim, sizes.hidden
    fused = sizes.features * sizes.target_hidden
    wanted: dict[str, Shape] = {
        "fc.weight": (h, fused),
        "midlayer.hidden_norm.weight": (h,),
        "norm.weight": (h,),
        "lm_head.weight": (sizes.draft_vocab, h),
    }
    for number in range(sizes.layers):
        layer, reads = layer_role(number), 2 * h if number == 0 else h
        attention = f"{layer}.self_attn."
        wanted |= {
            attention + "q_proj.weight": (query, reads),
            attention + "k_proj.weight": (key, reads),
            attention + "v_proj.weight": (key, reads),
            attention + "o_proj.weight": (h, query),
            f"{layer}.mlp.gate_proj.weight": (sizes.intermediate, h),
            f"{layer}.mlp.up_proj.weight": (sizes.intermediate, h),
            f"{layer}.mlp.down_proj.weight": (h, sizes.intermediate),
            f"{layer}.input_layernorm.weight": (h,),
            f"{layer}.post_attention_layernorm.weight": (h,),
        }
        if qkv_bias:
            biases = (("q", query), ("k", key), ("v", key))
            wanted |= {f"{attention}{name}_proj.bias": (size,) for name, size in biases}
        if output_bias:
            wanted[attention + "o_proj.bias"] = (h,)
    if fc_norm:
        wanted |= {f"fc_norm.{i}.weight": (sizes.target_hidden,) for i in range(sizes.features)}
    if input_norm:
        wanted["input_norm.weight"] = (fused,)
    if embeddings:
        wanted["embed_tokens.weight"] = (sizes.vocab, h)
    return wanted


@dataclass(frozen=True)
class Placed:
    """Tensors in their places: by role, roles that got none, names of the file that went nowhere."""

    weights: dict[str, Tensor]
    missing: tuple[str, ...]
    left_over: tuple[str, ...]


def place(engine: str, named: Iterable[tuple[str, str, Tensor]], wanted: dict[str, Shape]) -> Placed:
    """Put (name in the file, role, tensor) where an engine wants them; of two with one role the last one stays.

    Raises `TercelError` for another shape than the engine builds, as every engine does.
    """
    weights: dict[str, Tensor] = {}
    origin: dict[str, str] = {}
    left_over: list[str] = []
    for name, role, tensor in named:
        if role not in wanted:
            left_over.append(name)
            continue
        if tuple(tensor.shape) != wanted[role]:
            raise TercelError(
                f"{engine} builds {role} as {list(wanted[role])}, but {name} is {list(tensor.shape)}; config and "
                "weights are of different heads"
            )
        if role in origin:
            left_over.append(origin[role])
        weights[role], origin[role] = tensor, name
    return Placed(weights, tuple(role for role in wanted if role not in weights), tuple(left_over))


def check_map(engine: str, d2t: Tensor, sizes: Sizes) -> Tensor:
    """int64 `[W]`. Raises `TercelError` if a map does not fit the sizes, where engines fail late or silently."""
    if tuple(d2t.shape) != (sizes.draft_vocab,):
        raise TercelError(f"{engine} wants d2t as [{sizes.draft_vocab}], but the file has {list(d2t.shape)}")
    target = d2t.long() + torch.arange(sizes.draft_vocab)
    if int(target.min()) < 0 or int(target.max()) >= sizes.vocab:
        raise TercelError(f"{engine} would read d2t as offsets to ids outside the {sizes.vocab} tokens of the target")
    return d2t.long()


def check_captured(engine: str, layers: tuple[int, ...], features: int, num_layers: int) -> None:
    """Raises `TercelError` where an engine would stop: other numbers of layers than `fc` takes, or no such layer."""
    beyond = [layer for layer in layers if not 0 <= layer < num_layers]
    if beyond:
        raise TercelError(f"{engine} would capture the input of layer {beyond[0]} of a target with {num_layers} layers")
    if len(layers) != features:
        raise TercelError(f"{engine} captures {len(layers)} layers, but builds fc for {features}")
