"""A stock decoder as a function of a block and of the keys and values before it; that function as an OpenVINO graph.

Nothing is written to the past; the block's keys and values come out, and what is to stay of them is the cache's affair.
Attention is such that a token's bits do not depend on where its ancestors' keys lie (`ordered_attention`, `places.py`).

Shape legend: B rows, T block length, S slots of the past, K hidden size, q query heads, H key/value heads, D head size.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, cast

import openvino as ov
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from tercel.target_model.gguf import quiet_transformers
from tercel.target_model.int8 import Int8Weights
from tercel.target_model.openvino.convert import converted
from tercel.target_model.output_layer import OutputLayer
from tercel.target_model.stock import StockDecoder, layer_inputs
from tercel.target_model.structure import attention_windows, decoder_layers

NAME = "tercel_ordered_attention"
_FRONT = 5  # inputs before the past: a block, positions, lengths, who sees whom, whose slots these are
_ONES = 16  # columns: a product with one alone sums in another order than all others do
_EXAMPLE_ROWS, _EXAMPLE_BLOCK, _EXAMPLE_SLOTS = 2, 3, 5  # all different, so that no size is taken for another
Front = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Layout:
    """The keys and values of a decoder's layers.

    shapes: `(H, D)` of each, in the order in which a forward makes them: a layer's keys, then its values.
    """

    shapes: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, model: ov.Model) -> Layout:
        """Of a decoder's graph."""
        past = [port.partial_shape for port in model.inputs[_FRONT:]]
        return cls(tuple((shape[1].get_length(), shape[3].get_length()) for shape in past))

    @property
    def groups(self) -> dict[tuple[int, int], list[int]]:
        """Which of them have the same shape; nearly always all do, and can be moved as one."""
        found: dict[tuple[int, int], list[int]] = {}
        for place, shape in enumerate(self.shapes):
            found.setdefault(shape, []).append(place)
        return found


def slot_axes(model: ov.Model) -> dict[int, int]:
    """Of a decoder's graph: the axis of each input that grows with the context, by input."""
    return {_FRONT - 1: 0, **{place: 2 for place in range(_FRONT, len(model.inputs))}}


class BlockCache(Cache):
    """The cache that a decoder sees: the past `[B, H, S, D]` of every layer, and what a block adds `[B, H, T, D]`.

    ordered: whether its layers attend with `ordered_attention`, which joins past and block by itself.
    """

    def __init__(self, past: Sequence[Tensor], ordered: bool) -> None:
        super().__init__(layers=[])
        self.past, self.ordered = past, ordered
        self.block: list[Tensor] = []
        self.attended = 0  # layers whose attention was `ordered_attention`
        self._ones: dict[int, Tensor] = {}  # by the number of heads
        self._masks: dict[tuple[int, int], Tensor] = {}  # by the mask they are made of, and groups

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.block += [key_states, value_states]
        if self.ordered or not self.past:
            return key_states, value_states
        keys, values = self.latest
        return torch.cat([keys, key_states], 2), torch.cat([values, value_states], 2)

    @property
    def latest(self) -> tuple[Tensor, Tensor]:
        """The past of the layer that was updated last."""
        first = len(self.block) - 2
        return self.past[first], self.past[first + 1]

    def ones(self, values: Tensor) -> Tensor:
        """`[B, H, S + T, _ONES]`, made once for all layers with as many heads."""
        heads = int(values.shape[1])
        if heads not in self._ones:
            self._ones[heads] = torch.ones_like(values[..., :1]).expand(-1, -1, -1, _ONES)
        return self._ones[heads]

    def side_by_side(self, mask: Tensor, groups: int) -> Tensor:
        """A mask `[B, 1, T, S + T]` for the query heads of a key head as rows, made once for all layers that share it:
        `[B, 1, groups * T, S + T]`, or one row more where there is no group."""
        key = id(mask), groups
        if key not in self._masks:
            self._masks[key] = torch.cat([mask, mask[:, :, :1]] if groups == 1 else [mask] * groups, 2)
        return self._masks[key]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return int(self.past[0].shape[2]) if self.past else 0


_CURRENT: ContextVar[BlockCache] = ContextVar("the cache of the forward that runs")


def ordered_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query `[B, q, T, D]`, key and value of the block `[B, H, T, D]`, mask additive `[B, 1, T, S + T]`, past slots
    first → `[B, T, q, D]`. s_aux: a sink's score for every query head.

    Both sums over keys, weights times values and the weights alone, are products with the weights, because products sum
    in the order of the keys, and a sum along a row in the order of a vector's lanes. In OpenVINO all from the scores to
    the quotient is float32 (`precision.py`). Raises `ValueError` for a bias: it would need to know where the keys lie.
    """
    if position_bias is not None:
        raise ValueError("attention with a bias of its own")
    cache = _CURRENT.get()
    cache.attended += 1
    heads, kv, size, width = int(query.shape[1]), int(key.shape[1]), int(query.shape[3]), int(value.shape[3])
    groups = heads // kv
    scaled = query * (size**-0.5 if scaling is None else scaling)
    if groups == 1:  # a product of one row has a kernel of its own: the first token goes twice
        scaled = torch.cat([scaled, scaled[:, :, :1]], 2)
    side_by_side = scaled.reshape(query.shape[0], kv, -1, size)
    keys, values = key, value
    if cache.past:
        keys, values = (torch.cat(pair, 2) for pair in zip(cache.latest, (key, value), strict=True))
    scores = side_by_side @ keys.transpose(-1, -2)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores + cache.side_by_side(attention_mask, groups)
    most = scores.amax(-1, keepdim=True)
    sinks = None
    if s_aux is not None:
        sinks = s_aux.reshape(1, kv, groups, 1).expand(-1, -1, -1, scaled.shape[2]).reshape(1, kv, -1, 1)
        most = torch.maximum(most, sinks)
    weights = torch.exp(scores - most)
    total = (weights @ cache.ones(values))[..., :1]
    if sinks is not None:
        total = total + torch.exp(sinks - most)
    out = ((weights @ values) / total).reshape(query.shape[0], heads, -1, width)
    return (out[:, :, :-1] if groups == 1 else out).transpose(1, 2), None


class BlockGraph(nn.Module):
    """`decoder` as a function; captured layers, and numbers that go in and come out of type `dtype`."""

    def __init__(self, decoder: nn.Module, config: Any, capture: Sequence[int], dtype: torch.dtype) -> None:
        super().__init__()
        self.decoder, self.capture, self.dtype = decoder, tuple(capture), dtype
        self.ordered = False  # whether it attends with `ordered_attention`
        self.layers = decoder_layers(decoder, config.num_hidden_layers)
        self.windows = attention_windows(config)
        self.groups: list[list[int]] = []

    def forward(
        self, embedded: Tensor, positions: Tensor, lengths: Tensor, seen: Tensor, places: Tensor, *past: Tensor
    ) -> tuple[Tensor, ...]:
        """embedded `[B, T, K]`, positions `[B, T]`, lengths of the rows `[B]`, seen bool `[B, T, T]`, places `[S]`: the
        position of each slot's token, past `[B, H, S, D]` each → hidden and captured `[B, T, K]`, then the block's own,
        `[n, B, H, T, D]` a group.
        """
        front = (embedded.float(), positions, lengths, seen, places)
        hidden, layers, cache = self.run(front, [part.float() for part in past])
        groups = [torch.stack([cache.block[place] for place in places]) for places in self.groups]
        return tuple(out.to(self.dtype) for out in (hidden, *layers, *groups))

    def run(self, front: Front, past: Sequence[Tensor]) -> tuple[Tensor, list[Tensor], BlockCache]:
        embedded, positions = front[:2]
        cache = BlockCache(past, self.ordered)
        masks = {kind: _mask(front, bool(past), window) for kind, window in self.windows.items()}
        before = _CURRENT.set(cache)
        try:
            with layer_inputs(self.layers, self.capture) as captured:
                hidden = self.decoder(
                    inputs_embeds=embedded,
                    position_ids=positions,
                    attention_mask=masks if len(masks) > 1 else next(iter(masks.values())),
                    cache=cache,
                    use_cache=True,
                ).last_hidden_state
        finally:
            _CURRENT.reset(before)
        return hidden, [captured[layer] for layer in self.capture], cache


def _mask(front: Front, past: bool, window: int | None) -> Tensor:
    """Additive `[B, 1, T, S + T]`: the committed slots of each row, and of the block what it is to see."""
    _, positions, lengths, seen, places = front
    parts = [seen]
    if window is not None:
        parts[0] = seen & (positions[:, :, None] - positions[:, None, :] < window)
    if past:
        committed = places[None, None] < lengths[:, None, None]
        near = positions[:, :, None] - places[None, None] < (window or (1 << 30))
        parts.insert(0, committed & near)
    allowed = torch.cat(parts, -1)
    # bfloat16's lowest number, which it is in float32 too: that of float32 would be rounded to -inf
    low = torch.finfo(torch.bfloat16).min
    return torch.zeros(allowed.shape).masked_fill(~allowed, low)[:, None]


class OutputGraph(nn.Module):
    """The output layer with its scale and cap as one function, `[N, K]` to `[N, V]`."""

    def __init__(self, layer: OutputLayer, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = copy.deepcopy(layer.linear).float()
        self.layer, self.dtype = replace(layer, linear=self.linear, same_bits=False), dtype

    def forward(self, hidden: Tensor) -> Tensor:
        return self.layer(hidden.float()).to(self.dtype)


def convert_decoder(stock: StockDecoder, capture: Sequence[int], int8: Int8Weights | None = None) -> ov.Model:
    """The decoder as a graph. Inputs and outputs as `BlockGraph.forward`'s, in the model's own type; inside everything
    is float32, which OpenVINO computes in the precision it is compiled for. int8: the matrices that are rounded.

    Works on a copy, of which float32 is made: needs the memory for that. Raises whatever transformers, torch or
    OpenVINO raise for a model that they cannot follow.
    """
    decoder, dtype, width = copy.deepcopy(stock.decoder).float(), stock.model.dtype, stock.config.hidden_size
    graph = BlockGraph(decoder, stock.config, capture, dtype)
    rows, block, slots = _EXAMPLE_ROWS, _EXAMPLE_BLOCK, _EXAMPLE_SLOTS
    positions = torch.arange(block).expand(rows, -1).contiguous()
    lengths, seen = torch.tensor([2, slots]), torch.ones(rows, block, block, dtype=torch.bool).tril()
    front = (torch.zeros(rows, block, width), positions, lengths, seen, torch.arange(slots))
    with torch.no_grad(), quiet_transformers():
        layout = _layout(graph, front)
        graph.groups = list(layout.groups.values())
        past = [torch.zeros(rows, heads, slots, size, dtype=dtype) for heads, size in layout.shapes]
        kept = [[-1, heads, -1, size] for heads, size in layout.shapes]
        shapes = [[-1, -1, width], [-1, -1], [-1], [-1, -1, -1], [-1], *kept]
        return converted(graph, (front[0].to(dtype), *front[1:], *past), shapes, int8)


def convert_output(layer: OutputLayer, dtype: torch.dtype, int8: Int8Weights | None = None) -> ov.Model:
    """The output layer as a graph; int8: as `convert_decoder`'s."""
    width = cast(Tensor, layer.linear.weight).shape[1]
    return converted(OutputGraph(layer, dtype), [torch.zeros(2, width, dtype=dtype)], [[-1, width]], int8)


def _layout(graph: BlockGraph, front: Front) -> Layout:
    """The shapes of keys and values; makes the decoder attend with `ordered_attention` if all its layers can."""
    decoder = graph.decoder
    if isinstance(decoder, PreTrainedModel):
        own = decoder.config._attn_implementation
        AttentionInterface.register(NAME, ordered_attention)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        try:
            decoder.set_attn_implementation(NAME)
            graph.ordered = True
            cache = graph.run(front, ())[2]
        except (ValueError, TypeError):
            graph.ordered = False
        else:
            graph.ordered = 2 * cache.attended == len(cache.block)
        if not graph.ordered:
            decoder.set_attn_implementation(own)
    cache = graph.run(front, ())[2]
    return Layout(tuple((part.shape[1], part.shape[3]) for part in cache.block))
