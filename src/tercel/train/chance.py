"""What chance does to an EAGLE-3 head while it learns, so that it learns its data less by heart.

All of it comes of the batch's seed: a run that goes on, or has other ranks, meets the same chances.

Shape legend: N packed tokens, n captured layers, K target's hidden size, `..` any leading shape.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tercel.draft import Eagle3Head


def generator_of(seed: int, device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def noised(features: Tensor, layers: int, amount: float, chance: torch.Generator) -> Tensor:
    """Features `[N, n*K]` with a uniform number between minus and plus `amount` added to each, times the root mean
    square of its layer at that token: residual streams have a size of their own in every layer."""
    apart = features.unflatten(-1, (layers, -1))
    size = apart.float().pow(2).mean(-1, keepdim=True).sqrt()
    noise = torch.empty(apart.shape, device=features.device).uniform_(-amount, amount, generator=chance)
    return (apart + (noise * size).to(features.dtype)).flatten(-2)


@contextmanager
def dropping(head: Eagle3Head, share: float, chance: torch.Generator) -> Iterator[None]:
    """Within, what `fc`, attention and MLP give is dropped at random, a `share` of its numbers, and the rest is larger
    by as much."""

    def drop(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        kept = torch.empty_like(output).bernoulli_(1 - share, generator=chance)
        return output * kept.div_(1 - share)

    with ExitStack() as hooks:
        layers = (head.midlayer, *head.deeper)
        for module in (head.fc, *(part for layer in layers for part in (layer.self_attn.o_proj, layer.mlp))):
            hooks.callback(module.register_forward_hook(drop).remove)
        yield
