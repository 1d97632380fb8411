"""Attention for blocks under a mask, without copying keys for every query head.

Stock `transformers` repeats keys and values for each query head of a group before it attends under a mask (it needs
not for single tokens). After a long context that copy, in every layer, is what verifying a block costs over decoding
one token. Laying the query heads of a group side by side as rows gives the same sums and copies nothing but the mask.

Where a token is to have the same bits in every block, `slot_free.py` computes it.

Rows of a batch whose contexts differ in length attend one after another, each over its own (`RowStates`): there is no
padding to read.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from tercel.target_model.row_states import RowStates
from tercel.target_model.slot_free import slot_free_attention, split_of

NAME = "tercel_grouped_sdpa"


def use_grouped_attention(model: PreTrainedModel) -> bool:
    """Let a model that attends with `sdpa` use `grouped_sdpa` instead; others are left as they are, as are those whose
    attention cannot be chosen. Returns whether it does so."""
    if model.config._attn_implementation != "sdpa":
        return False
    AttentionInterface.register(NAME, grouped_sdpa)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
    return bool(model.config.get_text_config()._attn_implementation == NAME)


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

    Whatever is not under one mask of all heads, everything on CUDA (where this has not been measured), and a single row
    whose heads are not grouped or whose block is one token, is left to stock attention.
    """
    heads, kv = query.shape[1], key.shape[1]
    odd = attention_mask is None or attention_mask.shape[1] != 1 or key.is_cuda
    odd = odd or kwargs.get("softcap") is not None or kwargs.get("position_bias") is not None
    split = None if odd or attention_mask is None else split_of(attention_mask)
    if split is not None and key.shape[-1] == value.shape[-1]:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return slot_free_attention(query, key, value, split, scale), None
    if odd or (not isinstance(key, RowStates) and (query.shape[2] == 1 or heads == kv)):
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    assert attention_mask is not None
    return attend(query, key, value, attention_mask, dropout, scaling).contiguous(), None


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, dropout: float = 0.0, scaling: float | None = None
) -> Tensor:
    """As `grouped_sdpa`, for whatever heads and devices; `[B, T, q, D]`."""
    rows, heads, length, size = query.shape
    kv = key.shape[1]
    grouped = query.reshape(rows, kv, heads // kv * length, size)
    if isinstance(key, RowStates) and isinstance(value, RowStates):
        parts = zip(grouped.split(1), key.rows, value.rows, key.masks.own(mask, key.rows, heads // kv), strict=True)
        out = torch.cat([_sdpa(*part, dropout, scaling) for part in parts])
    else:
        out = _sdpa(grouped, key, value, mask.repeat(1, 1, heads // kv, 1), dropout, scaling)
    return out.reshape(rows, heads, length, value.shape[-1]).transpose(1, 2)


def _sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, dropout: float, scaling: float | None) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling)
