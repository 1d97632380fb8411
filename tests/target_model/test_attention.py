"""Grouped attention gives what stock attention gives."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from tercel.target_model.attention import NAME, grouped_sdpa, use_grouped_attention
from tercel.target_model.prefill import prefill
from tercel.target_model.row_states import RowStates, padded
from tests.decode.drafts import tiny_target
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


@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.parametrize("kv", [2, 4])
def test_rows_apart_attend_as_if_they_were_padded(length: int, kv: int) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(3, 4, length, 8, generator=generator)
    rows = [[torch.randn(1, kv, slots, 8, generator=generator) for slots in (9, 30, 5)] for _ in range(2)]
    mask = torch.full((3, 1, length, 30), torch.finfo(torch.float32).min)
    for row, own in enumerate(rows[0]):
        seen = torch.rand(length, own.shape[2], generator=generator) < 0.6
        seen[:, 0] = True
        mask[row, 0, :, : own.shape[2]].masked_fill_(seen, 0)
    apart, together = [RowStates(part) for part in rows], [padded(part) for part in rows]
    layer = Layer(4 // kv)
    ours, _ = grouped_sdpa(layer, query, apart[0], apart[1], mask, scaling=0.3)
    stock, _ = sdpa_attention_forward(layer, query, together[0], together[1], mask, scaling=0.3)
    torch.testing.assert_close(ours, stock)
    for row in range(3):  # to the bit as each would alone
        alone, _ = grouped_sdpa(
            layer,
            query[row : row + 1],
            rows[0][row],
            rows[1][row],
            mask[row : row + 1, ..., : rows[0][row].shape[2]],
            scaling=0.3,
        )
        assert torch.equal(ours[row], alone[0])


class Counted(TorchDispatchMode, Counter):
    """How often each operation ran."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self[func.__name__.split(".")[0]] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("arch", ["llama", "gpt2", "gemma3", "qwen3_moe"])
def test_a_ragged_batch_is_never_padded_to_its_longest_row(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, seen = tiny_target(arch), []
    cache = target.new_cache(3, 100)
    prefill(target, [list(range(5, 5 + length)) for length in (90, 7, 20)], cache)
    attend = F.scaled_dot_product_attention

    def watched(query, key, value, **kwargs):
        seen.append(tuple(key.shape))
        assert type(key) is torch.Tensor
        return attend(query, key, value, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    monkeypatch.setattr("tercel.target_model.row_states.padded", None)
    positions = torch.tensor(cache.lengths)[:, None] + torch.arange(2)
    with Counted() as calls:
        target.forward(torch.full((3, 2), 9), positions, cache)
    kinds = len(set(target.config.layer_types)) if arch == "gemma3" else 1
    assert calls["repeat"] <= 3 * kinds + 1  # a row's mask is made once for all layers
    assert [(shape[0], shape[2]) for shape in seen] == [(1, 92), (1, 9), (1, 22)] * target.num_layers
