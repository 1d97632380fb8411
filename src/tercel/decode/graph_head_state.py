"""A head's state that OpenVINO graphs compute, beside a target that they compute too.

Two libraries that take turns on the same cores wait for each other's threads: the head goes where its target goes.

Shape legend: B rows, T new entries, Q asked for an output, U drafted before, H head's hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tercel.decode.head_state import HeadState, HeadWindow
from tercel.draft import StepHead
from tercel.draft.graph import HeadGraphs
from tercel.target_model.openvino.cache import SlotCache
from tercel.target_model.openvino.places import positions_of
from tercel.target_model.protocol import TargetModel


class GraphHeadState(HeadState):
    """Drafted entries are kept beside the cache, until the first level of the next draft."""

    def __init__(
        self, head: StepHead, target: TargetModel, graphs: HeadGraphs, window: HeadWindow | None = None
    ) -> None:
        super().__init__(head, target, window)
        self._graphs = graphs
        self.cache: SlotCache = SlotCache(graphs.layout, graphs.dtype, 0)
        self._drafted = torch.empty(0)  # keys and values [2, B, kv, U, D]

    def _positions(self, rows: Sequence[int] | None) -> Tensor:
        cache = self.cache
        which = range(len(cache.lengths)) if rows is None else rows
        return torch.tensor([cache.lengths[row] + cache.forgotten[row] for row in which])

    def _fuse(self, features: Tensor) -> Tensor:
        return self._graphs.fuse(features)

    def _logits(self, output: Tensor) -> Tensor:
        return self._graphs.logits(output)

    def _write(
        self,
        embedding: Tensor,
        hidden: Tensor,
        positions: Tensor,
        ancestors: Tensor,
        asked: Tensor,
        rows: Sequence[int] | None,
    ) -> Tensor:
        count, width, _ = embedding.shape
        heads, size = self._graphs.layout.shapes[0]
        before = ancestors.shape[-1] - width
        drafted = torch.empty(2, count, heads, 0, size, dtype=embedding.dtype)
        if before:
            drafted = self._drafted[..., :before, :]
        which = range(len(self.cache.lengths)) if rows is None else rows
        past, lengths = self.cache.past(which), torch.tensor([self.cache.lengths[row] for row in which])
        places = positions_of(past[0].shape[2])
        entries, output = self._graphs.step(
            embedding, hidden, positions, asked, lengths, ancestors, places, past, drafted
        )
        self._drafted = torch.cat([drafted, entries], 3)
        self.cache.hold(which, [entries])
        return output
