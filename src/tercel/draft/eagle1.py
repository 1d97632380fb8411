"""The head of EAGLE and EAGLE-2 (arXiv 2401.15077, 2406.16858), for comparisons: both papers use the same one.

It predicts the target's next top-layer feature (after the final norm) from that feature and a token, and the
target's own output layer makes tokens of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tercel.draft.config import LAST_HIDDEN, LastHiddenConfig
from tercel.draft.head import AttendingHead, BorrowingHead, HeadWork
from tercel.draft.layers import MLP, Projected, RMSNorm, Rotary, rotate


@dataclass(frozen=True)
class Eagle1Config(LastHiddenConfig):
    """Sizes of such a head. fc_bias: whether `fc` has a bias."""

    kind: ClassVar[str] = "eagle1"

    fc_bias: bool = True
    own_output: bool = False


class _Attention(nn.Module):
    """Projections of a plain layer, which take `H`."""

    def __init__(self, c: Eagle1Config) -> None:
        super().__init__()
        query, key, bias = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim, c.attention_bias
        self.q_proj = nn.Linear(c.hidden_size, query, bias=bias)
        self.k_proj = nn.Linear(c.hidden_size, key, bias=bias)
        self.v_proj = nn.Linear(c.hidden_size, key, bias=bias)
        self.o_proj = nn.Linear(query, c.hidden_size, bias=bias)


class _Layer(nn.Module):
    """A decoder layer without its first norm, as in the public implementation (`fc` comes before it)."""

    def __init__(self, c: Eagle1Config) -> None:
        super().__init__()
        self.self_attn = _Attention(c)
        self.mlp = MLP(c)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)


class Eagle1Head(BorrowingHead, AttendingHead):
    """The same steps as those of EAGLE-3; there is nothing to fuse, and the output layer is the target's."""

    title = "EAGLE-1 or EAGLE-2"
    config_class = Eagle1Config
    config: Eagle1Config

    def __init__(self, config: Eagle1Config) -> None:
        super().__init__(config)
        c = config
        self.fc = nn.Linear(2 * c.hidden_size, c.hidden_size, bias=c.fc_bias)
        self.layers = nn.ModuleList([_Layer(c)])
        if c.own_embeddings:
            self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.rotary = Rotary.of(c)

    @property
    def layer(self) -> _Layer:
        """The only one."""
        found = self.layers[0]
        assert isinstance(found, _Layer)
        return found

    def in_words(self) -> str:
        return f"{self.title} (drafts with the target's output layer)"

    def reads_in_words(self) -> str:
        return LAST_HIDDEN

    def work(self) -> HeadWork:
        """q, k and v take `H`, and `fc` works for every drafted token."""
        c = self.config
        query, key = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        attention = c.hidden_size * (query + 2 * key) + query * c.hidden_size
        joined, mlp = 2 * c.hidden_size * c.hidden_size, 3 * c.hidden_size * c.intermediate_size
        drafted = joined + attention + mlp + c.hidden_size * c.draft_vocab_size
        return HeadWork(drafted=drafted, context=2 * query, fuse=0, kv=2 * key)

    def public_config(self, dtype: torch.dtype) -> dict[str, Any]:
        """As EAGLE's own loader has it, whose names the tensors have. It drafts with the whole output layer."""
        c = self.config
        config: dict[str, Any] = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "hidden_size": c.hidden_size,
            "intermediate_size": c.intermediate_size,
            "num_attention_heads": c.num_attention_heads,
            "num_key_value_heads": c.num_key_value_heads,
            "head_dim": c.head_dim,
            "hidden_act": "silu",
            "vocab_size": c.vocab_size,
            "rms_norm_eps": c.rms_norm_eps,
            "max_position_embeddings": c.max_position_embeddings,
            "rope_parameters": c.rope_parameters,
            "rope_theta": c.rope_parameters["rope_theta"],
            "attention_bias": c.attention_bias,
            "bias": c.fc_bias,
            "torch_dtype": str(dtype).removeprefix("torch."),
        }
        if c.rope_parameters.get("rope_type", "default") != "default":
            config["rope_scaling"] = c.rope_parameters
        return config

    def fuse(self, features: Tensor) -> Tensor:
        """`[.., H]`, as it is."""
        return features

    def project(self, embedding: Tensor, hidden: Tensor, positions: Tensor) -> Projected:
        """embedding, hidden: `[.., H]`; positions: `[..]`."""
        c, attention = self.config, self.layer.self_attn
        x = self.fc(torch.cat([embedding, hidden], dim=-1))
        shape = x.shape[:-1]
        cos, sin = self.rotary.cos_sin(positions, x.dtype)
        query = attention.q_proj(x).view(*shape, c.num_attention_heads, c.head_dim)
        key = attention.k_proj(x).view(*shape, c.num_key_value_heads, c.head_dim)
        value = attention.v_proj(x).view(*shape, c.num_key_value_heads, c.head_dim)
        return Projected(rotate(query, cos, sin), rotate(key, cos, sin), value, x)

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """residual `[.., H]` (of `project`), attended `[.., q*D]` to the predicted feature `[.., H]`."""
        hidden = residual + self.layer.self_attn.o_proj(attended)
        return hidden + self.layer.mlp(self.layer.post_attention_layernorm(hidden))

    def feedback(self, output: Tensor) -> Tensor:
        """The predicted feature itself."""
        return output
