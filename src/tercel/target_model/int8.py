"""Weights of eight bits: every matrix that tokens are multiplied with, rounded to whole multiples of a scale for each
output channel (symmetric, from -127 to 127).

The model is another one then, whoever computes it. Its modules hold the rounded numbers in their own type, which torch
computes with; a backend that multiplies with the whole numbers themselves gets them from `Int8Weights.codes_of`.

Shape legend: N output channels, K numbers that go in.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tercel.errors import TercelError
from tercel.target_model.experts import has_experts
from tercel.target_model.structure import decoder_of

MOST = 127  # of a whole number; -128 stays unused
GROUP = 32  # numbers of a token that share a scale where what goes into a product is rounded as well


class Int8Weights:
    """A model's matrices, rounded in place; an embedding that is also the output layer is one of them.

    Raises `TercelError` for a model of which other things than linear layers are matrices, or are quantised already.
    """

    @torch.no_grad()
    def __init__(self, model: PreTrainedModel, name: str) -> None:
        if has_experts(model.config.get_text_config()):
            raise TercelError(
                f"int8 weights are made of linear layers, and the experts of {name} are none; leave out --weights"
            )
        modules = [*decoder_of(model).modules(), cast(nn.Module, model.get_output_embeddings())]
        self.modules = [module for module in modules if isinstance(module, nn.Linear | Conv1D)]
        self._scales: dict[int, tuple[Tensor, Tensor]] = {}  # by identity: a weight, its scales as they divide it
        for module in self.modules:
            weight = module.weight
            if id(weight) in self._scales:
                continue
            if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
                raise TercelError(
                    f"the weights of {name} are quantised already ({str(weight.dtype).removeprefix('torch.')}); leave "
                    "out --weights"
                )
            scales = weight.float().abs().amax(_inner(module), keepdim=True) / MOST
            scales = torch.where(scales > 0, scales, 1.0)  # of a channel of zeros
            weight.copy_((weight / scales).round() * scales)
            self._scales[id(weight)] = weight, scales
        if not self._scales:
            raise TercelError(f"int8 weights are made of linear layers, and {name} has none; leave out --weights")

    def holds(self, parameter: Tensor) -> bool:
        """Whether it is one of the rounded matrices."""
        return id(parameter) in self._scales

    def codes_of(self, matrix: Tensor) -> tuple[Tensor, Tensor] | None:
        """Of a rounded matrix, found by its numbers in float32: int8 `[N, K]` (or `[K, N]`, as it lies) and float32
        scales `[N, 1]` (`[1, N]`), whose product it is a rounding of; None for any other."""
        for weight, scales in self._scales.values():
            if weight.shape == matrix.shape and torch.equal(weight[:1].float(), matrix[:1]):
                whole = weight.float()
                if torch.equal(whole, matrix):
                    return (whole / scales).round().to(torch.int8), scales
        return None

    @contextmanager
    def activations_rounded(self) -> Iterator[None]:
        """Within, what goes into each rounded matrix is rounded as well, each `GROUP` of a token's numbers to a scale
        of their own, as libraries do that multiply whole numbers."""
        hooks = [module.register_forward_pre_hook(_rounded_first) for module in self.modules]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _inner(module: nn.Module) -> int:
    """Along which dimension of its weight a module sums."""
    return 0 if isinstance(module, Conv1D) else 1


def _rounded_first(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    states: Tensor = args[0]
    size = states.shape[-1]
    groups = F.pad(states.float(), (0, -size % GROUP)).unflatten(-1, (-1, GROUP))
    scales = groups.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny) / MOST
    rounded = ((groups / scales).round() * scales).flatten(-2)[..., :size]
    return rounded.to(states.dtype), *args[1:]
