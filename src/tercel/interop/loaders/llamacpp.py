"""llama.cpp's eyes: `src/models/eagle3.cpp`, the loader's general hyperparameters and `common/speculative.cpp`
(mid-2026)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from torch import Tensor

from tercel.errors import TercelError
from tercel.interop.loaders.parts import EngineView, Sizes, check_captured, check_map, place, shapes

_PLAIN = {
    "fc.weight": "fc.weight",
    "enc.output_norm.weight": "input_norm.weight",
    "output_norm.weight": "norm.weight",
    "output.weight": "lm_head.weight",
    "token_embd.weight": "embed_tokens.weight",
    "blk.0.attn_norm.weight": "midlayer.input_layernorm.weight",
    "blk.0.attn_norm_2.weight": "midlayer.hidden_norm.weight",
    "blk.0.attn_q.weight": "midlayer.self_attn.q_proj.weight",
    "blk.0.attn_k.weight": "midlayer.self_attn.k_proj.weight",
    "blk.0.attn_v.weight": "midlayer.self_attn.v_proj.weight",
    "blk.0.attn_output.weight": "midlayer.self_attn.o_proj.weight",
    "blk.0.ffn_norm.weight": "midlayer.post_attention_layernorm.weight",
    "blk.0.ffn_gate.weight": "midlayer.mlp.gate_proj.weight",
    "blk.0.ffn_up.weight": "midlayer.mlp.up_proj.weight",
    "blk.0.ffn_down.weight": "midlayer.mlp.down_proj.weight",
}
_OPTIONAL = ("lm_head.weight", "embed_tokens.weight")  # then the target's


def view_llamacpp(folder: Path, num_layers: int) -> EngineView:
    """The one GGUF file of the folder."""
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        raise TercelError(f"{folder} holds {len(files)} GGUF files; llama.cpp takes one as the draft")
    fields, tensors = _read(files[0])

    def key(name: str, default: Any = None) -> Any:
        value = fields.get(f"eagle3.{name}", default)
        if value is None:
            raise TercelError(f"llama.cpp stops because {files[0]} has no key eagle3.{name}")
        return value

    if fields.get("general.architecture") != "eagle3":
        raise TercelError(f"{files[0]} is a {fields.get('general.architecture')} model to llama.cpp, no EAGLE-3 draft")
    layers = tuple(int(i) for i in key("target_layers"))
    if len(layers) != 3:
        raise TercelError(f"llama.cpp takes exactly three target_layers, not {len(layers)}")
    check_captured("llama.cpp", layers, 3, num_layers)
    sizes = _sizes(key, fields, tensors, files[0])
    flags = {
        "norm_before_residual": bool(key("norm_before_residual", False)),
        "norm_before_fc": bool(key("norm_before_fc", False)),
        "norm_output": False,  # the decoder hands on what comes before the last norm
        "fc_norm": False,
    }
    wanted = shapes(sizes, input_norm=flags["norm_before_fc"], embeddings=True)
    factors, d2t = tensors.pop("rope_freqs.weight", None), tensors.pop("d2t", None)
    named = [(name, _PLAIN.get(name, name), tensor) for name, tensor in tensors.items()]
    placed = place("llama.cpp", named, wanted)
    if placed.left_over:
        raise TercelError(f"llama.cpp stops at {placed.left_over[0]}: it has no place for this tensor")
    needed = [role for role in placed.missing if role not in _OPTIONAL]
    if needed:
        raise TercelError(f"llama.cpp stops because {files[0]} has no {needed[0]}")
    if "lm_head.weight" in placed.missing and d2t is not None:
        raise TercelError("llama.cpp would take the target's output layer, whose rows d2t does not fit")
    own = "embed_tokens.weight" in placed.weights
    if not own and sizes.hidden != sizes.target_hidden:
        raise TercelError("llama.cpp would look tokens up in the target's embeddings, which are of another width")
    for name, heads in (("q", sizes.heads), ("k", sizes.kv_heads)):
        role = f"midlayer.self_attn.{name}_proj.weight"
        placed.weights[role] = _halves(placed.weights[role], heads)
    return EngineView(
        engine="llamacpp",
        sizes=sizes,
        layers=layers,
        weights=placed.weights,
        flags=flags,
        d2t=check_map("llama.cpp", d2t.long() - torch.arange(len(d2t)), sizes) if d2t is not None else None,
        embeddings="own" if own else "target",
        rope=_rope(key, factors),
        random=("lm_head.weight",) if "lm_head.weight" in placed.missing else (),
        skipped=(),
    )


def _read(file: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        reader = GGUFReader(file)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        tensors = {}
        for tensor in reader.tensors:
            whole = np.issubdtype(tensor.data.dtype, np.signedinteger)
            data = tensor.data if whole else dequantize(tensor.data, tensor.tensor_type)
            tensors[tensor.name] = torch.from_numpy(np.array(data))
    except (ValueError, KeyError, IndexError, OSError, NotImplementedError) as error:
        raise TercelError(f"{file} is not a whole GGUF file ({error}); export the head again") from error
    return fields, tensors


def _sizes(key: Callable[..., Any], fields: dict[str, Any], tensors: dict[str, Tensor], file: Path) -> Sizes:
    """`load_hparams`: what general keys say; the vocabulary is the tokenizer's, the drafted one `d2t`'s."""
    vocabulary = fields.get("tokenizer.ggml.tokens")
    if vocabulary is None or "tokenizer.ggml.model" not in fields:
        raise TercelError(f"{file} has no tokenizer, so llama.cpp cannot load it; export it with the target's GGUF")
    if int(key("block_count")) != 1:
        raise TercelError(f"{file} has {key('block_count')} layers; llama.cpp's EAGLE-3 decoder has one")
    hidden, heads = int(key("embedding_length")), int(key("attention.head_count"))
    head_dim = int(key("attention.key_length", hidden // heads))
    if any(int(key(name, head_dim)) != head_dim for name in ("rope.dimension_count", "attention.value_length")):
        raise TercelError(f"{file} rotates or reads another size than its heads have; llama.cpp refuses it")
    return Sizes(
        hidden=hidden,
        target_hidden=int(key("target_hidden_size")),
        intermediate=int(key("feed_forward_length")),
        heads=heads,
        kv_heads=int(key("attention.head_count_kv", heads)),
        head_dim=head_dim,
        vocab=len(vocabulary),
        draft_vocab=len(tensors["d2t"]) if "d2t" in tensors else len(vocabulary),
        features=3,
        eps=float(key("attention.layer_norm_rms_epsilon")),
        positions=int(key("context_length")),
    )


def _rope(key: Callable[..., Any], factors: Tensor | None) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(key("rope.freq_base", 10000.0))}
    kind, factor = key("rope.scaling.type", "linear"), float(key("rope.scaling.factor", 0.0))
    if kind not in ("linear", "none"):
        raise TercelError(f"the RoPE scaling {kind!r} in the file is not checked for llama.cpp")
    if kind == "linear" and factor:
        rope = {**rope, "rope_type": "linear", "factor": factor}
    return rope if factors is None else {**rope, "freq_factors": factors}


def _halves(weight: Tensor, heads: int) -> Tensor:
    """Rows in the order of neighbouring pairs, as ggml rotates them, back to the two halves that Llama rotates."""
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
