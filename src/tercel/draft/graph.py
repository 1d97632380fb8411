"""The arithmetic of a head that drafts step by step, as OpenVINO graphs.

Shape legend: B rows, T new entries of each, Q of them that are asked for an output, S slots of committed entries, U
entries drafted before, L decoder layers, H head's hidden size, Ht target's, n captured layers, W draft vocabulary, q/kv
heads, D head size.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from tercel.draft.head import LayerHead
from tercel.draft.layers import Projected
from tercel.errors import TercelError
from tercel.target_model.openvino.convert import converted
from tercel.target_model.openvino.graph import Layout
from tercel.target_model.openvino.runtime import CompiledGraph

SPARE, OFTEN = 12, 64  # instances of the step for sizes of their own: a head is small, and soon prepared
_ROWS, _BLOCK, _SLOTS, _DRAFTED, _ASKED = 2, 3, 5, 4, 2  # of the example, so that no size is taken for another


class HeadGraphs:
    """`fuse`, a step over the cache, and the output layer of a head, each in one run of a graph.

    Raises `TercelError` for a head that OpenVINO cannot follow.
    """

    def __init__(self, head: LayerHead) -> None:
        self.dtype, config = head.dtype, head.config
        own = copy.deepcopy(head).float()
        self._hidden, self._vocabulary = config.hidden_size, config.draft_vocab_size
        deeper = len(head.deeper)
        self._asked = _BLOCK if deeper else _ASKED  # all new entries, where a layer reads another's outputs
        wide = torch.zeros(_BLOCK, config.num_features * config.target_hidden_size, dtype=self.dtype)
        narrow = torch.zeros(_ROWS, _BLOCK, self._hidden, dtype=self.dtype)
        try:
            with torch.no_grad():
                key = own.project(narrow.float(), narrow.float(), torch.zeros(_ROWS, _BLOCK, dtype=torch.long)).key
            self.layout = Layout(((key.shape[2], key.shape[3]),) * (2 * (1 + deeper)))
            self._fuse = self._compiled(_Function(own.fuse, self.dtype), [wide], [[-1, wide.shape[1]]])
            logits = _Function(own.logits, torch.float32)
            self._logits = self._compiled(logits, [narrow[0]], [[-1, self._hidden]])
            self._step = self._compiled(_Step(own, self.dtype), self._example(narrow), self._shapes(), SPARE)
        except Exception as error:  # of torch or OpenVINO, over a head that they cannot follow
            reason = " ".join(str(error).split()) or type(error).__name__
            raise TercelError(f"OpenVINO cannot compute the draft head: {reason[:200]}") from error

    def fuse(self, features: Tensor) -> Tensor:
        """`[.., n*Ht]` to `[.., H]`."""
        return self._apply(self._fuse, features, self._hidden, self.dtype)

    def logits(self, output: Tensor) -> Tensor:
        """`[.., H]` to float32 `[.., W]`."""
        return self._apply(self._logits, output, self._vocabulary, torch.float32)

    def step(
        self,
        embedding: Tensor,
        hidden: Tensor,
        positions: Tensor,
        asked: Tensor,
        lengths: Tensor,
        own: Tensor,
        places: Tensor,
        past: Sequence[Tensor],
        drafted: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """New entries: embedding, hidden `[B, T, H]`, positions `[B, T]`, after `past`, each layer's keys and values
        `[B, kv, S, D]` of which a row has `lengths` `[B]` at the positions `places` `[S]`, and `drafted`
        `[2L, B, kv, U, D]`.

        asked `[B, Q]`: which of them are to give an output, all of them where there are deeper layers; own bool
        `[B, Q, U + T]`: what each of those sees of what is not committed. Returns keys and values `[2L, B, kv, T, D]`
        and outputs `[B, Q, H]`.
        """
        rows, block, _ = embedding.shape
        heads, size = self.layout.shapes[0]
        entries = torch.empty(len(self.layout.shapes), rows, heads, block, size, dtype=self.dtype)
        output = torch.empty(rows, asked.shape[1], self._hidden, dtype=self.dtype)
        inputs = (embedding, hidden, positions, asked, lengths, own, places, *past, drafted)
        sizes = rows, block, *own.shape[1:]
        self._step.run([tensor.contiguous() for tensor in inputs], [entries, output], sizes)
        return entries, output

    def _apply(self, graph: CompiledGraph, states: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        flat = states.reshape(-1, states.shape[-1]).contiguous()
        out = torch.empty(len(flat), width, dtype=dtype)
        graph.run([flat], [out])
        return out.reshape(*states.shape[:-1], width)

    def _compiled(
        self, function: nn.Module, example: list[Tensor], shapes: list[list[int]], spare: int = 0
    ) -> CompiledGraph:
        return CompiledGraph(converted(function, example, shapes), self.dtype, spare, OFTEN)

    def _example(self, narrow: Tensor) -> list[Tensor]:
        heads, size = self.layout.shapes[0]
        past = torch.zeros(_ROWS, heads, _SLOTS, size, dtype=self.dtype)
        return [
            narrow,
            narrow,
            torch.arange(_BLOCK).expand(_ROWS, -1).contiguous(),
            torch.zeros(_ROWS, self._asked, dtype=torch.long),
            torch.tensor([2, _SLOTS]),
            torch.ones(_ROWS, self._asked, _DRAFTED + _BLOCK, dtype=torch.bool),
            torch.arange(_SLOTS),
            *[past] * len(self.layout.shapes),
            torch.zeros(len(self.layout.shapes), _ROWS, heads, _DRAFTED, size, dtype=self.dtype),
        ]

    def _shapes(self) -> list[list[int]]:
        heads, size = self.layout.shapes[0]
        hidden, past, parts = [-1, -1, self._hidden], [-1, heads, -1, size], len(self.layout.shapes)
        front = [hidden, hidden, [-1, -1], [-1, -1], [-1], [-1, -1, -1], [-1]]
        return [*front, *[past] * parts, [parts, -1, heads, -1, size]]


class _Function(nn.Module):
    """One of a head's functions, computed in float32. gives: the type of what comes out."""

    def __init__(self, function: Callable[[Tensor], Tensor], gives: torch.dtype) -> None:
        super().__init__()
        self.function, self.gives = function, gives

    def forward(self, states: Tensor) -> Tensor:
        return self.function(states.float()).to(self.gives)


class _Step(nn.Module):
    """`HeadGraphs.step`, computed in float32. gives: the type of what comes out."""

    def __init__(self, head: LayerHead, gives: torch.dtype) -> None:
        super().__init__()
        self.head, self.gives = head, gives

    def forward(
        self,
        embedding: Tensor,
        hidden: Tensor,
        positions: Tensor,
        asked: Tensor,
        lengths: Tensor,
        own: Tensor,
        places: Tensor,
        *kept: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """kept: `past`, and `drafted`."""
        *past, drafted = kept
        rows, count = own.shape[0], own.shape[1]
        committed = (places[None, None] < lengths[:, None, None]).expand(-1, count, -1)
        hide = torch.finfo(torch.bfloat16).min
        seen = torch.cat([committed, own], -1)
        mask = torch.zeros(seen.shape).masked_fill(~seen, hide)[:, None, None]
        entries: list[Tensor] = []

        def attended(layer: int, now: Projected) -> tuple[Tensor, Tensor]:
            new, first = (now.key.transpose(1, 2), now.value.transpose(1, 2)), 2 * layer
            entries.extend(new)
            keys, values = (
                torch.cat([past[first + part].float(), drafted[first + part].float(), new[part]], 2) for part in (0, 1)
            )
            heads, kv, size = int(now.query.shape[2]), int(now.key.shape[2]), int(now.query.shape[3])
            query = torch.take_along_dim(now.query.flatten(2), asked[..., None], 1).reshape(rows, count, kv, -1, size)
            query = query.permute(0, 2, 3, 1, 4).reshape(rows, kv, -1, size) * size**-0.5  # of a key head side by side
            scores = (query @ keys.transpose(-1, -2)).reshape(rows, kv, heads // kv, count, -1) + mask
            weights = torch.exp(scores - scores.amax(-1, keepdim=True))
            weights = (weights / weights.sum(-1, keepdim=True)).reshape(rows, kv, (heads // kv) * count, -1)
            mixed = (weights @ values).reshape(rows, kv, heads // kv, count, size)
            mixed = mixed.permute(0, 3, 1, 2, 4).reshape(rows, count, heads * size)
            return torch.take_along_dim(now.residual, asked[..., None], 1), mixed

        now = self.head.project(embedding.float(), hidden.float(), positions)
        output = self.head.step(now, positions, attended)
        return torch.stack(entries).to(self.gives), output.to(self.gives)
