"""Attention for blocks under a mask, without copying keys for every query head.

Stock `transformers` repeats keys and values for each query head of a group before it attends under a mask (it needs
not for single tokens). After a long context that copy, in every layer, is what verifying a block costs over decoding
one token. Laying the query heads of a group side by side as rows gives the same sums and copies nothing but the mask.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "tercel_grouped_sdpa"


def use_grouped_attention(model: PreTrainedModel) -> None:
    """Let a model that attends with `sdpa` use `grouped_sdpa` instead; others are left as they are."""
    if model.config._attn_implementation != "sdpa":
        return
    AttentionInterface.register(NAME, grouped_sdpa)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)


def grouped_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query `[B, q, T, D]`, key and value `[B, kv, S, D]`, mask additive or bool `[B, 1, T, S]` → `[B, T, q, D]`.

    Whatever is not a block of grouped heads under one mask, and everything on CUDA (where this has not been measured),
    is left to stock attention.
    """
    rows, heads, length, size = query.shape
    kv = key.shape[1]
    plain = attention_mask is None or attention_mask.shape[1] != 1 or length == 1 or heads == kv
    if plain or kwargs.get("softcap") is not None or kwargs.get("position_bias") is not None or key.is_cuda:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    assert attention_mask is not None
    groups = heads // kv
    out = F.scaled_dot_product_attention(
        query.reshape(rows, kv, groups * length, size),
        key,
        value,
        attn_mask=attention_mask.repeat(1, 1, groups, 1),
        dropout_p=dropout,
        scale=scaling,
    )
    return out.reshape(rows, heads, length, value.shape[-1]).transpose(1, 2).contiguous(), None
