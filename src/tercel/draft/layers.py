"""Parts that draft heads are made of; their parameters go by the names of the public checkpoint formats.

Shape legend: `..` any leading shape, H head's hidden size, q/kv heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tercel.draft.config import HeadConfig


class RMSNorm(nn.Module):
    """Root-mean-square norm, statistics in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (normed * self.weight.float()).to(x.dtype)


class Rotary(LlamaRotaryEmbedding):
    """One set of frequencies, in float32 whatever the head is cast to.

    Rounded to bfloat16 they are off by radians some hundred tokens into a text, and a head trained so fits no
    engine. Types that follow the length of a sequence (`longrope`, dynamic NTK; heads made elsewhere may name them)
    stay at those of short sequences, in training as in decoding: entries made earlier are kept when a text grows.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Rotary:
        exact, original = self.inv_freq, self.original_inv_freq
        super()._apply(fn, recurse)
        self.inv_freq = nn.Buffer(exact.to(self.inv_freq.device), persistent=False)
        self.original_inv_freq = nn.Buffer(original.to(self.original_inv_freq.device), persistent=False)
        return self

    @classmethod
    def of(cls, c: HeadConfig) -> Rotary:
        return cls(
            LlamaConfig(
                hidden_size=c.hidden_size,
                num_attention_heads=c.num_attention_heads,
                head_dim=c.head_dim,
                max_position_embeddings=c.max_position_embeddings,
                rope_parameters=dict(c.rope_parameters),
            )
        )

    def cos_sin(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """`[..]` to two of `[.., 1, D]`, made in float32."""
        angles = positions[..., None, None].float() * self.inv_freq.to(positions.device)
        angles = torch.cat([angles, angles], -1)
        cos, sin = angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling
        return cos.to(dtype), sin.to(dtype)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, c: HeadConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


@dataclass(frozen=True)
class Projected:
    """Rotated queries `[.., q, D]`, rotated keys and values `[.., kv, D]`, and `[.., H]`, what attention adds to."""

    query: Tensor
    key: Tensor
    value: Tensor
    residual: Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding on halves: `x` `[.., heads, D]`, `cos`/`sin` `[.., 1, D]`."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
