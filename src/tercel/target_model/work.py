"""What a forward cannot do without: the bytes it has to read, and the numbers it has to multiply.

Both are lower bounds, whoever computes it: what is read is read once, and nothing is computed for padding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from tercel.target_model.experts import expert_share
from tercel.target_model.int8 import Int8Weights
from tercel.target_model.output_layer import OutputLayer, probe_tokens
from tercel.target_model.stock import StockDecoder


@dataclass(frozen=True)
class AttentionWork:
    """Of one attending layer. kv: bytes of the keys and values of a token of context; macs: multiply-accumulates of
    attention's own products, for a token and each of its context; window: how much context it sees (None: all)."""

    kv: int
    macs: int
    window: int | None = None

    def seen(self, context: int) -> int:
        return context if self.window is None else min(context, self.window)


@dataclass(frozen=True)
class TargetWork:
    """layers, output: bytes of the weights of all layers and of the output layer, which a block reads once (of experts
    those of one token); layer_macs, output_macs: multiply-accumulates (MACs) with them, for each token."""

    layers: int
    output: int
    layer_macs: int
    output_macs: int
    attention: tuple[AttentionWork, ...]

    def cache_bytes(self, context: int) -> int:
        """Keys and values of so much context, all layers together."""
        return sum(layer.kv * layer.seen(context) for layer in self.attention)

    def forward_bytes(self, context: int) -> int:
        """Of a block after so much context, of whatever width; the output layer apart."""
        return self.layers + self.cache_bytes(context)

    def forward_macs(self, width: int, context: int) -> int:
        """Of a block of `width` tokens after so much context; the output layer apart."""
        return width * (self.layer_macs + sum(layer.macs * layer.seen(context) for layer in self.attention))


@torch.no_grad()
def stock_work(stock: StockDecoder, output: OutputLayer, whole: Int8Weights | None = None) -> TargetWork:
    """Counted in a stock model's own parameters, and in what one token leaves in a cache. whole: which of them are read
    as whole numbers of a byte."""

    def size(parameter: torch.Tensor) -> int:
        return 1 if whole is not None and whole.holds(parameter) else parameter.element_size()

    share = expert_share(stock.config)
    layers = macs = 0.0
    for name, module in stock.decoder.named_modules():  # shared ones once
        if isinstance(module, nn.Embedding):  # a row is read of it
            continue
        used = share if "experts" in name and "shared" not in name else 1.0
        for parameter in module.parameters(recurse=False):
            layers += used * parameter.numel() * size(parameter)
            macs += used * parameter.numel() * (parameter.ndim > 1)
    weight = output.linear.weight
    assert isinstance(weight, torch.Tensor)
    return TargetWork(
        layers=round(layers),
        output=weight.numel() * size(weight),
        layer_macs=round(macs),
        output_macs=weight.numel(),
        attention=_attention(stock),
    )


def _attention(stock: StockDecoder) -> tuple[AttentionWork, ...]:
    cache = DynamicCache(config=stock.config)
    stock.run(probe_tokens(stock.model)[:, :1], (), cache=cache)
    attending = []
    for layer in cache.layers:
        if not isinstance(layer, DynamicLayer) or layer.keys is None or layer.values is None:
            continue  # a state of one size
        numbers = layer.keys[0, :, 0].numel() + layer.values[0, :, 0].numel()
        each = layer.keys.shape[-1] + layer.values.shape[-1]
        window = layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None
        heads = stock.config.num_attention_heads
        attending.append(AttentionWork(numbers * layer.keys.element_size(), heads * each, window))
    return tuple(attending)
