"""Rows of a cache side by side, as they run together: a short row neither holds nor computes what a long one needs.

All rows of a run have as many slots as its longest needs, and every run reads the weights once more. Rows of different
chunks (`places.py`) never run together: so a row's sums are those that it has alone.

Shape legend: B rows of a shelf, H key/value heads, S slots, D head size, n keys or values of one shape
(`Layout.groups`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import groupby

import torch
from torch import Tensor

from tercel.target_model.openvino.graph import Layout
from tercel.target_model.openvino.places import chunk_of, slots_before

SPARE = 12  # a shelf that is made anew has room for a twelfth more rows


def arranged(lengths: Sequence[int], run: float) -> list[list[int]]:
    """Rows of such lengths, in groups that run together, the longest first. run: how many slots' attention takes as
    long as another run."""
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    groups: list[list[int]] = []
    for _, members in groupby(order, key=lambda row: chunk_of(lengths[row])):
        by_slots = groupby(members, key=lambda row: slots_before(lengths[row]))
        groups += _joined([(slots, list(rows)) for slots, rows in by_slots], run)
    return groups


def _joined(levels: Sequence[tuple[int, list[int]]], run: float) -> list[list[int]]:
    """Rows by the slots that they need, most first; neighbours are joined where that costs least in all."""
    best: list[tuple[float, list[list[int]]]] = [(0.0, [])]  # of the first levels: costs and groups
    for end in range(1, len(levels) + 1):
        options = []
        for begin in range(end):
            group = [row for _, rows in levels[begin:end] for row in rows]
            cost, groups = best[begin]
            options.append((cost + run + levels[begin][0] * len(group), [*groups, group]))
        best.append(min(options, key=lambda option: option[0]))
    return best[-1][1]


class Shelf:
    """rows: who lies at each place, from the first on. storage: `[n, room, H, S, D]` a group; a place is left with
    zeros, not with what was there: masked slots still enter the product with weight 0, and 0 * NaN is NaN."""

    def __init__(self, layout: Layout, dtype: torch.dtype) -> None:
        self._layout, self._dtype = layout, dtype
        self.rows: list[int] = []
        self.room = self.slots = 0
        self.storage: list[Tensor] = []

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.storage)

    def taken(self, place: int, slots: int) -> list[Tensor]:
        """A copy of what lies there, `[n, H, S, D]` a group."""
        return [part[:, place, :, :slots].clone() for part in self.storage]

    def hold(self, rows: Collection[int], slots: int, coming: Mapping[int, Sequence[Tensor]]) -> None:
        """Let these rows lie here, and no others, with so many slots; coming: what those bring that did not."""
        stay = set(self.rows).intersection(rows)
        self._close_gaps(stay)
        ample = len(rows) + len(rows) // SPARE
        if slots != self.slots or not len(rows) <= self.room <= ample + 1:
            self._resize(ample, slots)
        for row in rows:
            if row not in stay:
                for part, own in zip(self.storage, coming.get(row, ()), strict=row in coming):
                    part[:, len(self.rows), :, : own.shape[2]] = own[:, :, :slots]
                self.rows.append(row)

    def _close_gaps(self, stay: Collection[int]) -> None:
        """The last of those who stay take the places of those who do not; no other is moved."""
        count = len(stay)
        gaps = [place for place in range(count) if self.rows[place] not in stay]
        movers = [place for place in range(count, len(self.rows)) if self.rows[place] in stay]
        for gap, place in zip(gaps, movers, strict=True):
            self.rows[gap] = self.rows[place]
            for part in self.storage:
                part[:, gap] = part[:, place]
        for part in self.storage:
            part[:, count : len(self.rows)].zero_()
        del self.rows[count:]

    def _resize(self, room: int, slots: int) -> None:
        kept, before = min(slots, self.slots), self.storage
        self.storage = [
            torch.zeros(len(places), room, heads, slots, size, dtype=self._dtype)
            for (heads, size), places in self._layout.groups.items()
        ]
        for part, old in zip(self.storage, before, strict=bool(before)):
            part[:, : len(self.rows), :, :kept] = old[:, : len(self.rows), :, :kept]
        self.room, self.slots = room, slots
