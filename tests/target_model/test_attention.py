"""Grouped attention gives what stock attention gives."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from tercel.target_model.attention import NAME, grouped_sdpa, use_grouped_attention
from tests.tiny import tiny_model


class Layer(nn.Module):
    is_causal = True

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.num_key_value_groups = groups


@pytest.mark.parametrize(("heads", "kv", "length", "rows"), [(4, 2, 5, 1), (6, 2, 3, 2), (4, 4, 5, 1), (4, 1, 1, 2)])
@pytest.mark.parametrize("masked", [True, False])
def test_equals_stock_attention(heads: int, kv: int, length: int, rows: int, masked: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(rows, heads, length, 8, generator=generator)
    key, value = (torch.randn(rows, kv, 9, 8, generator=generator) for _ in range(2))
    mask = None
    if masked:
        seen = torch.rand(rows, 1, length, 9, generator=generator) < 0.6
        seen[..., 0] = True
        mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    layer = Layer(heads // kv)
    ours, _ = grouped_sdpa(layer, query, key, value, mask, scaling=0.3)
    stock, _ = sdpa_attention_forward(layer, query, key, value, mask, scaling=0.3)
    torch.testing.assert_close(ours, stock)


def test_only_sdpa_is_replaced() -> None:
    model = tiny_model("llama")
    model.set_attn_implementation("sdpa")
    use_grouped_attention(model)
    assert model.config._attn_implementation == NAME
    model.set_attn_implementation("eager")
    use_grouped_attention(model)
    assert model.config._attn_implementation == "eager"
