"""Tiny random causal LMs of many architectures and a tokenizer for them: fast, seeded, no file, no network.

The weights are large enough (`initializer_range` 0.4, norms and biases off their neutral values) that logits
are far from uniform: an argmax that flips in a test means a fault, not rounding.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType, GGUFWriter, quants
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTBigCodeConfig,
    GPTJConfig,
    GPTNeoConfig,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

ARCHS = (
    "llama",
    "qwen2",
    "qwen3",
    "gemma3",
    "mistral",
    "gpt_neox",
    "mixtral",
    "qwen3_moe",
    "phi3",
    "granite",
)
# other names for the same sizes, learned positions, attention that only `eager` computes
OTHER_ARCHS = ("gpt2", "opt", "gptj", "falcon", "gpt_bigcode", "gemma2", "gpt_oss")
LEARNED_POSITIONS = ("gpt2", "opt", "gpt_bigcode")
# no rollback or no mask from outside: decoded token by token
STEP_ARCHS = ("mamba", "bloom", "gpt_neo", "qwen3_next")
VOCAB = 128
SPECIALS = ("<unk>", "<pad>", "<|im_start|>", "<|im_end|>")
UNK, PAD, IM_START, IM_END = range(len(SPECIALS))

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# In order of merging; each joins two tokens that are there by then. "Ġ" is the byte-level space.
# fmt: off
_MERGES = (
    "Ġ t", "h e", "Ġ a", "i n", "r e", "o n", "Ġt he", "e r", "Ġ s", "a n", "o u", "Ġ w", "i s", "a t",
    "e n", "in g", "Ġ o", "i t", "e s", "Ġ c", "o r", "Ġ b", "l l", "n d", "Ġ f", "e d"
)
# fmt: on
DIGIT_MERGE = "2 0"


def tiny_config(arch: str, **overrides: Any) -> PretrainedConfig:
    """Configuration of one of these architectures; `overrides` win over the common sizes."""
    common: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
        "initializer_range": 0.4,
        "bos_token_id": IM_START,
        "eos_token_id": IM_END,
        "pad_token_id": PAD,
        "tie_word_embeddings": False,
    }
    layers = overrides.get("num_hidden_layers", common["num_hidden_layers"])
    grouped = {**common, "num_key_value_heads": 2, "head_dim": 8}
    windows = ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]
    unlike = {k: v for k, v in common.items() if k not in ("intermediate_size", "num_attention_heads")}
    gpt = {
        **{k: v for k, v in common.items() if k.endswith(("token_id", "range", "embeddings")) and "max" not in k},
        **{"vocab_size": VOCAB, "n_positions": 256, "n_embd": 32, "n_layer": layers, "n_head": 4},
    }
    linear = {f"linear_{kind}_head_dim": 8 for kind in ("key", "value")}
    linear |= {f"linear_num_{kind}_heads": 2 for kind in ("key", "value")}
    moe = {"num_experts_per_tok": 2, "output_router_logits": False}
    kinds: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
        "llama": (LlamaConfig, {**grouped, "tie_word_embeddings": True}),
        "qwen2": (Qwen2Config, {**common, "num_key_value_heads": 2}),
        "qwen3": (Qwen3Config, grouped),
        "gemma3": (
            Gemma3TextConfig,
            {
                **grouped,
                "tie_word_embeddings": True,
                "sliding_window": 8,
                "query_pre_attn_scalar": 8,
                "layer_types": windows,
            },
        ),
        "mistral": (MistralConfig, {**grouped, "sliding_window": 8}),
        "gpt_neox": (GPTNeoXConfig, common),
        "mixtral": (MixtralConfig, {**grouped, **moe, "num_local_experts": 4, "sliding_window": None}),
        "qwen3_moe": (Qwen3MoeConfig, {**grouped, **moe, "num_experts": 4, "moe_intermediate_size": 48}),
        "phi3": (Phi3Config, {**common, "num_key_value_heads": 2, "original_max_position_embeddings": 256}),
        "granite": (GraniteConfig, {**common, "num_key_value_heads": 2, "attention_multiplier": 0.35}),
        "gpt2": (GPT2Config, gpt),
        "opt": (OPTConfig, {**unlike, "num_attention_heads": 4, "ffn_dim": 64, "word_embed_proj_dim": 32}),
        "gptj": (GPTJConfig, {**gpt, "rotary_dim": 4}),
        "falcon": (FalconConfig, {**unlike, "num_attention_heads": 4}),
        "gpt_bigcode": (GPTBigCodeConfig, gpt),
        "gemma2": (
            Gemma2Config,
            {**grouped, "sliding_window": 8, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0},
        ),
        "gpt_oss": (
            GptOssConfig,
            {
                **grouped,
                **moe,
                "num_local_experts": 4,
                "sliding_window": 8,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            },
        ),
        "mamba": (MambaConfig, {**unlike, "state_size": 4}),
        "bloom": (BloomConfig, {**unlike, "n_layer": layers, "n_head": 4}),
        "gpt_neo": (
            GPTNeoConfig,
            {
                **{k: v for k, v in unlike.items() if k != "num_hidden_layers"},
                **{"num_layers": layers, "num_heads": 4, "window_size": 8},
                "attention_types": [[["global", "local"], layers // 2]],
            },
        ),
        "qwen3_next": (
            Qwen3NextConfig,
            {
                **grouped,
                **moe,
                **linear,
                **{"num_experts": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
                "layer_types": ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)],
            },
        ),
    }
    config_class, settings = kinds[arch]
    return config_class(**{**settings, **overrides})


def tiny_model(arch: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Random float32 model in eval mode; sizes as in `tiny_config`, attention as transformers chooses it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(tiny_config(arch, **overrides), dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval().requires_grad_(False)


def tiny_tokenizer(chat_template: str | None = CHATML, last_merge: str = "a r") -> PreTrainedTokenizerFast:
    """Byte-level BPE of 128 tokens: 4 specials, printable ASCII with tab and newline, 27 merges.

    ASCII text survives encoding and decoding; other characters become `<unk>`. No default merge has digits,
    so that a family's own splitting of numbers, which transformers imposes on Qwen2 folders, changes nothing.
    """
    letters = [chr(code) for code in range(33, 127)] + ["Ġ", "Ċ", "ĉ"]
    merges = [(left, right) for left, right in (pair.split(" ") for pair in (*_MERGES, last_merge))]
    tokens = [*SPECIALS, *letters, *("".join(pair) for pair in merges)]
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(BPE(vocab=vocab, merges=merges, unk_token="<unk>"))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = ByteLevelDecoder()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        pad_token="<pad>",
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def save_tiny(folder: Path, arch: str, seed: int = 0, **overrides: Any) -> Path:
    """Save a tiny model of `arch` with its tokenizer into `folder/arch`, as `save_pretrained` does."""
    path = folder / arch
    tiny_model(arch, seed, **overrides).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def save_tiny_gguf(
    file: Path, pre: str = "smollm", quantised: bool = False, without: str = "", seed: int = 0
) -> PreTrainedModel:
    """Write the tiny llama and tokenizer (with `DIGIT_MERGE`) as a GGUF file; return the model it holds.

    `quantised` packs the matrices as Q8_0; tensors whose name contains a non-empty `without` are left out.
    """
    model, tokenizer = tiny_model("llama", seed), tiny_tokenizer(last_merge=DIGIT_MERGE)
    config = model.config
    writer = GGUFWriter(file, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([str(tokenizer.convert_ids_to_tokens(index)) for index in range(VOCAB)])
    writer.add_token_types([3 if index < len(SPECIALS) else 1 for index in range(VOCAB)])
    writer.add_token_merges([*_MERGES, DIGIT_MERGE])
    writer.add_bos_token_id(IM_START)
    writer.add_eos_token_id(IM_END)
    writer.add_unk_token_id(UNK)
    writer.add_pad_token_id(PAD)
    writer.add_chat_template(CHATML)
    for name, weight in model.state_dict().items():
        gguf_name = _gguf_name(name)
        if gguf_name is None or (without and without in gguf_name):
            continue
        array = _gguf_order(gguf_name, weight, config).numpy()
        if quantised and array.ndim == 2:
            kind = GGMLQuantizationType.Q8_0
            writer.add_tensor(gguf_name, quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _gguf_name(name: str) -> str | None:
    """GGUF's name of a llama weight; None for the tied output matrix, which the format leaves out."""
    stem = name.removesuffix(".weight")
    if stem in _GGUF_NAMES:
        return f"{_GGUF_NAMES[stem]}.weight"
    if stem == "lm_head":
        return None
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_GGUF_NAMES[part]}.weight"


def _gguf_order(name: str, weight: torch.Tensor, config: PretrainedConfig) -> torch.Tensor:
    """Rows of q and k as the format has them: the two halves of each head's rotation interleaved."""
    heads = {"attn_q.": config.num_attention_heads, "attn_k.": config.num_key_value_heads}
    for part, count in heads.items():
        if part in name:
            halves = weight.view(count, 2, weight.shape[0] // count // 2, weight.shape[1])
            return halves.transpose(1, 2).reshape(weight.shape).contiguous()
    return weight
