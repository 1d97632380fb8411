"""A head's state that OpenVINO graphs compute, beside a target that they compute too.

Two libraries that take turns on the same cores wait for each other's threads: the head goes where its target goes.

Shape legend: B rows, T new entries, Q asked for an output, U drafted before, L decoder layers, H head's hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tercel.decode.head_state import AttendedState, HeadWindow
from tercel.draft import LayerHead
from tercel.draft.graph import HeadGraphs
from tercel.target_model.openvino.cache import SlotCache
from tercel.target_model.openvino.places import positions_of
from tercel.target_model.openvino.runtime import BUCKETS, bucket
from tercel.target_model.protocol import TargetModel

# Of one row's new entries, of those that are asked and of those drafted before: few, so that what is committed and what
# is drafted mostly go through the same instance of the graph, whose weights are near then.
FEW = (4, 16, 64)


class GraphHeadState(AttendedState):
    """Drafted entries are kept beside the cache, until the first level of the next draft."""

    def __init__(
        self, head: LayerHead, target: TargetModel, graphs: HeadGraphs, window: HeadWindow | None = None
    ) -> None:
        super().__init__(head, target, window)
        self._graphs = graphs
        self.cache: SlotCache = SlotCache(graphs.layout, graphs.dtype, 0)
        self._drafted = torch.empty(0, 0, 0, 0, 0)  # each layer's keys and values [2L, B, kv, U, D], and room for more

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
        count, wanted, _ = embedding.shape
        before, asking = ancestors.shape[-1] - wanted, asked.shape[1]
        # few sizes: a graph prepares itself anew for others than the last time's
        sizes = FEW if count == 1 else BUCKETS  # what is computed for nothing counts for every row
        width, queries, held = (bucket(size, sizes) for size in (wanted, asking, before))
        self._make_room(count, held)
        which = range(len(self.cache.lengths)) if rows is None else rows
        past, lengths = self.cache.past(which), torch.tensor([self.cache.lengths[row] for row in which])
        places = positions_of(past[0].shape[2])
        own = torch.zeros(count, queries, held + width, dtype=torch.bool)
        own[:, :asking, :before] = ancestors[..., :before]
        own[:, :asking, held : held + wanted] = ancestors[..., before:]
        own[:, asking:, held] = True  # a query without a key has no mean
        extra = (0, width - wanted)
        entries, output = self._graphs.step(
            F.pad(embedding, (0, 0, *extra)),
            F.pad(hidden, (0, 0, *extra)),
            F.pad(positions, extra),
            F.pad(asked, (0, queries - asking)),
            lengths,
            own,
            places,
            past,
            self._drafted[..., :held, :],
        )
        entries = entries[..., :wanted, :]
        self._make_room(count, before + wanted)
        self._drafted[..., before : before + wanted, :] = entries
        self.cache.hold(which, [(range(count), [entries])])
        return output[:, :asking]

    def _make_room(self, rows: int, slots: int) -> None:
        """For drafted entries, of which those of earlier levels stay."""
        shapes, drafted = self._graphs.layout.shapes, self._drafted
        if drafted.shape[1] != rows:
            heads, size = shapes[0]
            self._drafted = torch.zeros(len(shapes), rows, heads, bucket(slots), size, dtype=self._graphs.dtype)
        elif drafted.shape[3] < slots:
            self._drafted = F.pad(drafted, (0, 0, 0, bucket(slots) - drafted.shape[3]))
