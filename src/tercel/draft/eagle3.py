"""The EAGLE-3 draft head: one decoder layer over fused target features (paper section 3.1, spec section 2).

The module computes; who attends to what is the caller's: training-time test and the decoding tree bring their
own attention between `project` and `finish`. Parameter names are those of the public checkpoint format.

Shape legend: `..` any leading shape, H head's hidden size, Ht target's, n captured layers, q/kv heads, D head
size, W draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tercel.draft.config import HeadConfig
from tercel.draft.layers import MLP, Projected, RMSNorm, Rotary, rotate
from tercel.errors import TercelError


class Attention(nn.Module):
    """Projections only; q, k and v take the concatenated embedding and hidden, `2H`."""

    def __init__(self, c: HeadConfig) -> None:
        super().__init__()
        query, key, bias = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim, c.attention_bias
        self.q_proj = nn.Linear(2 * c.hidden_size, query, bias=bias)
        self.k_proj = nn.Linear(2 * c.hidden_size, key, bias=bias)
        self.v_proj = nn.Linear(2 * c.hidden_size, key, bias=bias)
        self.o_proj = nn.Linear(query, c.hidden_size, bias=bias)


class MidLayer(nn.Module):
    """The head's only decoder layer."""

    def __init__(self, c: HeadConfig) -> None:
        super().__init__()
        self.self_attn = Attention(c)
        self.mlp = MLP(c)
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.hidden_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)


class Eagle3Head(nn.Module):
    """One draft step is `project` → (attention) → `finish` → `logits`; `fuse` makes the first hidden."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        c = self.config = config
        width = c.num_features * c.target_hidden_size
        self.fc = nn.Linear(width, c.hidden_size, bias=False)
        self.fc_norm = nn.ModuleList(
            [RMSNorm(c.target_hidden_size, c.rms_norm_eps) for _ in range(c.num_features)] if c.fc_norm else []
        )
        if c.norm_before_fc:
            self.input_norm = RMSNorm(width, c.rms_norm_eps)
        self.midlayer = MidLayer(c)
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

    @property
    def device(self) -> torch.device:
        return self.fc.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

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
        c, layer = self.config, self.midlayer
        normed = layer.hidden_norm(hidden)
        x = torch.cat([layer.input_layernorm(embedding), normed], dim=-1)
        shape = x.shape[:-1]
        cos, sin = self.cos_sin(positions, x.dtype)
        query = layer.self_attn.q_proj(x).view(*shape, c.num_attention_heads, c.head_dim)
        key = layer.self_attn.k_proj(x).view(*shape, c.num_key_value_heads, c.head_dim)
        value = layer.self_attn.v_proj(x).view(*shape, c.num_key_value_heads, c.head_dim)
        residual = normed if c.norm_before_residual else hidden
        return Projected(rotate(query, cos, sin), rotate(key, cos, sin), value, residual)

    def cos_sin(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """`[..]` to two of `[.., 1, D]`, made in float32."""
        return self.rotary.cos_sin(positions, dtype)

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """residual `[.., H]` (of `project`), attended `[.., q*D]` to the layer's output `[.., H]`, before the final
        norm."""
        layer = self.midlayer
        hidden = residual + layer.self_attn.o_proj(attended)
        return hidden + layer.mlp(layer.post_attention_layernorm(hidden))

    def feedback(self, output: Tensor) -> Tensor:
        """What the next step takes as its hidden: the output itself, or normed (EAGLE-3.1)."""
        return self.norm(output) if self.config.norm_output else output

    def logits(self, output: Tensor) -> Tensor:
        """`[.., H]` to `[.., W]`. Raises `TercelError` for a head that has no output layer and was lent none."""
        if not self.config.own_output:
            raise TercelError("the head drafts with its target's output layer; load it together with the target")
        return self.lm_head(self.norm(output))
