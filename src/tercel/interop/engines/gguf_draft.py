"""The GGUF draft that llama.cpp loads: what its own converter makes of a head, with the target's tokenizer.

Keys and names are those of `src/models/eagle3.cpp` and `conversion/llama.py`; the tokenizer is copied, key by key, from
the target's GGUF, which the server needs in any case.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from gguf import (
    GGML_QUANT_VERSION,
    GGMLQuantizationType,
    GGUFReader,
    GGUFValueType,
    GGUFWriter,
    LlamaFileType,
    quantize,
)
from gguf.gguf_reader import ReaderField
from torch import Tensor

from tercel.draft import DraftModel, HeadConfig
from tercel.errors import TercelError
from tercel.target_model.gguf_header import check_header

ARCHITECTURE = "eagle3"
_NAMES = {
    "fc": "fc",
    "input_norm": "enc.output_norm",
    "norm": "output_norm",
    "lm_head": "output",
    "embed_tokens": "token_embd",
    "midlayer.input_layernorm": "blk.0.attn_norm",
    "midlayer.hidden_norm": "blk.0.attn_norm_2",
    "midlayer.self_attn.q_proj": "blk.0.attn_q",
    "midlayer.self_attn.k_proj": "blk.0.attn_k",
    "midlayer.self_attn.v_proj": "blk.0.attn_v",
    "midlayer.self_attn.o_proj": "blk.0.attn_output",
    "midlayer.post_attention_layernorm": "blk.0.ffn_norm",
    "midlayer.mlp.gate_proj": "blk.0.ffn_gate",
    "midlayer.mlp.up_proj": "blk.0.ffn_up",
    "midlayer.mlp.down_proj": "blk.0.ffn_down",
}


def write_gguf(model: DraftModel, file: Path, dtype: torch.dtype, target_name: str, target_gguf: Path) -> None:
    """Write the head, placed and expressible, with the tokenizer of `target_gguf`.

    Raises `TercelError` if that is no GGUF file or has a vocabulary of another size.
    """
    c = model.head.config
    writer = GGUFWriter(file, ARCHITECTURE)
    writer.add_type("model")
    writer.add_name(f"EAGLE-3 draft for {target_name}")
    writer.add_file_type(LlamaFileType.MOSTLY_BF16 if dtype == torch.bfloat16 else LlamaFileType.ALL_F32)
    writer.add_quantization_version(GGML_QUANT_VERSION)
    _add_sizes(writer, c)
    _copy_tokenizer(writer, target_gguf, c.vocab_size)
    for name, parameter in model.head.named_parameters():
        _add_tensor(writer, name, parameter.detach().float().cpu(), c, dtype)
    if c.rope_parameters.get("rope_type", "default") == "llama3":
        writer.add_tensor("rope_freqs.weight", _frequency_factors(c).numpy())
    if model.vocabulary.pruned:  # ids of the target, not offsets
        writer.add_tensor("d2t", model.vocabulary.ids.numpy().astype(np.int64))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_sizes(writer: GGUFWriter, c: HeadConfig) -> None:
    writer.add_block_count(1)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_vocab_size(c.vocab_size)
    writer.add_rope_dimension_count(c.head_dim)
    writer.add_rope_freq_base(float(c.rope_parameters["rope_theta"]))
    if c.rope_parameters.get("rope_type") == "linear":
        writer.add_string(f"{ARCHITECTURE}.rope.scaling.type", "linear")
        writer.add_float32(f"{ARCHITECTURE}.rope.scaling.factor", float(c.rope_parameters["factor"]))
    # the architecture is younger than the released writer, so its own keys are spelled out
    writer.add_array(f"{ARCHITECTURE}.target_layers", list(c.feature_layers))
    writer.add_uint32(f"{ARCHITECTURE}.target_hidden_size", c.target_hidden_size)
    writer.add_bool(f"{ARCHITECTURE}.norm_before_residual", c.norm_before_residual)
    writer.add_bool(f"{ARCHITECTURE}.norm_before_fc", c.norm_before_fc)


def _add_tensor(writer: GGUFWriter, name: str, tensor: Tensor, c: HeadConfig, dtype: torch.dtype) -> None:
    for projection, heads in (("q_proj", c.num_attention_heads), ("k_proj", c.num_key_value_heads)):
        if name.endswith(f"{projection}.weight"):
            tensor = _pairs(tensor, heads)
    data, gguf_name = tensor.contiguous().numpy(), f"{_NAMES[name.removesuffix('.weight')]}.weight"
    if tensor.ndim == 2 and dtype == torch.bfloat16:
        kind = GGMLQuantizationType.BF16
        writer.add_tensor(gguf_name, quantize(data, kind), raw_dtype=kind)
    else:  # norms stay float32, as llama.cpp wants them
        writer.add_tensor(gguf_name, data.astype(np.float32))


def _pairs(weight: Tensor, heads: int) -> Tensor:
    """Rows of a rotated projection, from Llama's two halves to neighbouring pairs, which ggml rotates."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def _frequency_factors(c: HeadConfig) -> Tensor:
    """What Llama 3's scaling divides each frequency by, `[D/2]`."""
    rope, size = c.rope_parameters, c.head_dim
    waves = 2 * torch.pi * float(rope["rope_theta"]) ** (torch.arange(0, size, 2).double() / size)
    context, factor = float(rope["original_max_position_embeddings"]), float(rope["factor"])
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    smooth = (context / waves - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    factors = torch.where(waves > context / low, factor, between)
    return torch.where(waves < context / high, 1.0, factors).float()


def _copy_tokenizer(writer: GGUFWriter, target: Path, vocab_size: int) -> None:
    check_header(target)
    try:
        fields = [field for field in GGUFReader(target).fields.values() if field.name.startswith("tokenizer.")]
        tokens = next((len(field.data) for field in fields if field.name == "tokenizer.ggml.tokens"), 0)
    except (ValueError, KeyError, IndexError, OSError) as error:
        raise TercelError(f"{target} is not a whole GGUF file ({error}); give the one llama-server will run") from error
    if tokens != vocab_size:
        raise TercelError(
            f"the tokenizer in {target} has {tokens} tokens, but the head is for a target of {vocab_size}; give the "
            "GGUF of the head's own target"
        )
    for field in fields:
        _copy(writer, field)


def _copy(writer: GGUFWriter, field: ReaderField) -> None:
    kind = field.types[0]
    inner = field.types[-1] if kind == GGUFValueType.ARRAY else None
    writer.add_key_value(field.name, field.contents(), kind, sub_type=inner)
