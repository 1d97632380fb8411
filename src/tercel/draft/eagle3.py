"""The EAGLE-3 draft head: one decoder layer over fused target features (paper section 3.1, spec section 2), or more.

Parameter names are those of the public checkpoint format.

Shape legend: `..` any leading shape, H head's hidden size, Ht target's, n captured layers, q/kv heads, D head
size, W draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from tercel.draft.config import FLAGS, LAST_HIDDEN, HeadConfig, engine_default_layers
from tercel.draft.head import AttendingHead, HeadWork, LayerHead
from tercel.draft.layers import MLP, Projected, RMSNorm, Rotary, rotate
from tercel.errors import TercelError

if TYPE_CHECKING:
    from tercel.target_model.protocol import TargetModel


class Attention(nn.Module):
    """Projections only; q, k and v take `width` numbers."""

    def __init__(self, c: HeadConfig, width: int) -> None:
        super().__init__()
        query, key, bias = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim, c.attention_bias
        self.q_proj = nn.Linear(width, query, bias=bias)
        self.k_proj = nn.Linear(width, key, bias=bias)
        self.v_proj = nn.Linear(width, key, bias=bias)
        self.o_proj = nn.Linear(query, c.hidden_size, bias=bias)
        self.heads, self.kv_heads, self.head_dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim

    def of(self, x: Tensor, rotary: Rotary, positions: Tensor, residual: Tensor) -> Projected:
        """x: `[.., width]`; positions: `[..]`; residual: `[.., H]`, what attention adds to."""
        shape = x.shape[:-1]
        cos, sin = rotary.cos_sin(positions, x.dtype)
        query = self.q_proj(x).view(*shape, self.heads, self.head_dim)
        key = self.k_proj(x).view(*shape, self.kv_heads, self.head_dim)
        value = self.v_proj(x).view(*shape, self.kv_heads, self.head_dim)
        return Projected(rotate(query, cos, sin), rotate(key, cos, sin), value, residual)


class _Layer(nn.Module):
    """What follows attention, in every layer."""

    self_attn: Attention
    mlp: MLP
    post_attention_layernorm: RMSNorm

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """residual `[.., H]`, attended `[.., q*D]` to the layer's output `[.., H]`."""
        hidden = residual + self.self_attn.o_proj(attended)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class MidLayer(_Layer):
    """The first decoder layer, nearly always the only one: q, k and v take the concatenated embedding and hidden."""

    def __init__(self, c: HeadConfig) -> None:
        super().__init__()
        self.self_attn = Attention(c, 2 * c.hidden_size)
        self.mlp = MLP(c)
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.hidden_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)


class FurtherLayer(_Layer):
    """An ordinary decoder layer behind the first."""

    def __init__(self, c: HeadConfig) -> None:
        super().__init__()
        self.self_attn = Attention(c, c.hidden_size)
        self.mlp = MLP(c)
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.rotary = Rotary.of(c)

    def project(self, hidden: Tensor, positions: Tensor) -> Projected:
        """hidden: `[.., H]`; positions: `[..]`."""
        return self.self_attn.of(self.input_layernorm(hidden), self.rotary, positions, hidden)


class FusingHead(LayerHead):
    """The layer of spec section 2 and what stands around it, however its outputs are used."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        c = config
        width = c.num_features * c.target_hidden_size
        self.fc = nn.Linear(width, c.hidden_size, bias=False)
        self.fc_norm = nn.ModuleList(
            [RMSNorm(c.target_hidden_size, c.rms_norm_eps) for _ in range(c.num_features)] if c.fc_norm else []
        )
        if c.norm_before_fc:
            self.input_norm = RMSNorm(width, c.rms_norm_eps)
        self.midlayer = MidLayer(c)
        # by the numbers that engines give them
        self.layers = nn.ModuleDict({str(number): FurtherLayer(c) for number in range(1, c.num_decoder_layers)})
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        if c.own_output:
            self.lm_head = nn.Linear(c.hidden_size, c.draft_vocab_size, bias=False)
        if c.own_embeddings:
            self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.rotary = Rotary.of(c)
        self.initialise()

    @torch.no_grad()
    def initialise(self, std: float = 0.02) -> None:
        """Normal(0, `std`) matrices, unit norms."""
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=std)
            elif "norm" in name:
                nn.init.ones_(parameter)
            else:  # biases
                nn.init.zeros_(parameter)

    def reads_in_words(self) -> str:
        c = self.config
        if not c.feature_layers:
            return "not listed: inputs of layers 2, L/2 and L-3 of the target's L, as engines take them (see --target)"
        if c.reads_last_hidden:
            return LAST_HIDDEN
        depth = "" if c.target_num_layers is None else f" of {c.target_num_layers}"
        return f"inputs of layers {', '.join(map(str, c.feature_layers))}{depth}"

    def work(self) -> HeadWork:
        """q, k and v take `2H` in the first layer and `H` in those behind it, the output layer has `W` rows."""
        c, layers = self.config, self.config.num_decoder_layers
        query, key = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        attention = (1 + layers) * c.hidden_size * (query + 2 * key) + layers * query * c.hidden_size
        mlp = layers * 3 * c.hidden_size * c.intermediate_size
        return HeadWork(
            drafted=attention + mlp + c.hidden_size * c.draft_vocab_size,
            context=layers * 2 * query,
            fuse=c.num_features * c.target_hidden_size * c.hidden_size,
            kv=layers * 2 * key,
        )

    @property
    def deeper(self) -> Sequence[FurtherLayer]:
        return tuple(cast(FurtherLayer, layer) for layer in self.layers.values())

    def fuse(self, features: Tensor) -> Tensor:
        """`[.., n*Ht]` (residual streams, low to high) to the hidden of step 0, `[.., H]`."""
        if self.config.fc_norm:
            parts = features.chunk(self.config.num_features, dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        if self.config.norm_before_fc:
            features = self.input_norm(features)
        return self.fc(features)

    def project(self, embedding: Tensor, hidden: Tensor, positions: Tensor) -> Projected:
        """embedding, hidden: `[.., H]`; positions: `[..]` (spec section 3). Embedding comes first."""
        layer = self.midlayer
        normed = layer.hidden_norm(hidden)
        x = torch.cat([layer.input_layernorm(embedding), normed], dim=-1)
        residual = normed if self.config.norm_before_residual else hidden
        return layer.self_attn.of(x, self.rotary, positions, residual)

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """residual `[.., H]` (of `project`), attended `[.., q*D]` to the first layer's output `[.., H]`, before the
        final norm."""
        return self.midlayer.finish(residual, attended)

    def logits(self, output: Tensor) -> Tensor:
        """`[.., H]` to `[.., W]`. Raises `TercelError` for a head that has no output layer and was lent none."""
        if not self.config.own_output:
            raise TercelError("the head drafts with its target's output layer; load it together with the target")
        return self.lm_head(self.norm(output))


class Eagle3Head(FusingHead, AttendingHead):
    """The head of spec section 2."""

    title = "EAGLE-3"
    config_class = HeadConfig

    def in_words(self) -> str:
        found = [name for name in FLAGS if vars(self.config)[name]]
        if (layers := self.config.num_decoder_layers) > 1:
            found.insert(0, f"{layers} decoder layers")
        newer = "EAGLE-3.1" if self.config.fc_norm or self.config.norm_output else self.title
        return f"{newer} ({', '.join(found)})" if found else newer

    def public_config(self, dtype: torch.dtype) -> dict[str, Any]:
        return public_config(self.config, dtype)

    def beside(self, target: TargetModel, ids: Tensor) -> Eagle3Head:
        """With the target's output rows of its draft vocabulary as its own, if it has no output layer (the paper's
        text, section 3.1)."""
        if self.config.own_output:
            return self
        return self.rebuilt(replace(self.config, own_output=True), {"lm_head.weight": target.output_rows(ids)})

    def feedback(self, output: Tensor) -> Tensor:
        """What the next step takes as its hidden: the output itself, or normed (EAGLE-3.1)."""
        return self.norm(output) if self.config.norm_output else output


def public_config(c: HeadConfig, dtype: torch.dtype) -> dict[str, Any]:
    """`config.json` as the public loaders read it; every default that engines disagree on is written out."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": c.num_decoder_layers,
        "hidden_size": c.hidden_size,
        "target_hidden_size": c.target_hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_attention_heads": c.num_attention_heads,
        "num_key_value_heads": c.num_key_value_heads,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "vocab_size": c.vocab_size,
        "draft_vocab_size": c.draft_vocab_size,
        "rms_norm_eps": c.rms_norm_eps,
        "max_position_embeddings": c.max_position_embeddings,
        "rope_parameters": c.rope_parameters,
        "rope_theta": c.rope_parameters["rope_theta"],
        "attention_bias": c.attention_bias,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "norm_before_residual": c.norm_before_residual,
        "norm_before_fc": c.norm_before_fc,
        "fc_norm": c.fc_norm,
        "norm_output": c.norm_output,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    if c.rope_parameters.get("rope_type", "default") != "default":
        config["rope_scaling"] = c.rope_parameters
    default = () if c.target_num_layers is None else engine_default_layers(c.target_num_layers)
    if c.feature_layers != default:  # engines assume the default; only then do they agree on what an id means
        config["eagle_aux_hidden_state_layer_ids"] = list(c.feature_layers)  # inputs: vLLM and llama.cpp read it here
        outputs = [i - 1 for i in c.feature_layers]  # SGLang and SpecForge read it there
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": outputs}
    return config
