"""What a forward has to read and to multiply, counted by hand and for every architecture."""

from __future__ import annotations

import pytest
import torch

from tercel.target_model.model import Target
from tercel.target_model.sources import Source
from tercel.target_model.work import AttentionWork
from tests.tiny import ARCHS, OTHER_ARCHS, STEP_ARCHS, VOCAB, tiny_model


def target_of(arch: str, dtype: torch.dtype = torch.float32, **overrides: int) -> Target:
    return Target(tiny_model(arch, **overrides).to(dtype), None, Source(arch, arch, "folder", None))


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_of_a_llama_by_hand(dtype: torch.dtype, size: int) -> None:
    work = target_of("llama", dtype).work
    matrices = 32 * 32 + 2 * 16 * 32 + 32 * 32 + 3 * 64 * 32  # q; k and v; o; MLP
    assert work.layer_macs == 8 * matrices
    assert work.layers == (8 * (matrices + 2 * 32) + 32) * size  # two norms a layer, one behind them
    assert (work.output_macs, work.output) == (VOCAB * 32, VOCAB * 32 * size)
    assert work.attention == (AttentionWork(kv=2 * 2 * 8 * size, macs=4 * 2 * 8),) * 8
    assert work.forward_bytes(100) == work.layers + 100 * 8 * 32 * size
    assert work.forward_macs(3, 100) == 3 * (work.layer_macs + 100 * 8 * 64)


def test_a_window_bounds_what_is_read() -> None:
    work = target_of("gemma3").work  # every other layer has a window of 8
    layer = work.attention[0].kv
    assert work.cache_bytes(8) == 8 * 8 * layer
    assert work.cache_bytes(108) == (4 * 8 + 4 * 108) * layer


def test_a_token_meets_some_of_the_experts() -> None:
    few, all_of_them = (target_of("mixtral", num_experts_per_tok=count).work for count in (2, 4))
    assert all_of_them.layer_macs - few.layer_macs == 8 * 2 * 3 * 64 * 32
    assert few.layers < all_of_them.layers


@pytest.mark.parametrize("arch", [*ARCHS, *OTHER_ARCHS, *STEP_ARCHS])
def test_of_every_architecture(arch: str) -> None:
    target = target_of(arch, **({"num_hidden_layers": 4} if arch == "qwen3_next" else {}))
    work = target.work
    held = sum(parameter.numel() for parameter in target.model.parameters())
    assert 0 < work.layer_macs <= work.layers / 4 <= held
    assert bool(work.attention) == (arch != "mamba")
    assert work.forward_bytes(50) >= work.layers
