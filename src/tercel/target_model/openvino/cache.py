"""The OpenVINO target's cache: committed keys and values alone, which the graph reads where they lie.

A block's own keys and values come out of the graph beside them. So rolling back costs nothing, and keeping a path
copies that path, in all layers at once, and nothing else. Which slot a token gets is `places.py`'s affair.

Shape legend: R rows there is room for, B rows of a block, T block length, H key/value heads, S slots, D head size, n
keys or values of one shape (`Layout.groups`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tercel.errors import TercelError
from tercel.target_model.memory import CacheMemory
from tercel.target_model.openvino.graph import Layout
from tercel.target_model.openvino.places import STEP, slots_before, slots_of


class SlotCache:
    """A `RowCache`: slot `places.slot(p)` of a row holds its committed token at position `p`."""

    def __init__(self, layout: Layout, dtype: torch.dtype, rows: int) -> None:
        self._layout, self._dtype = layout, dtype
        self.lengths: list[int] = [0] * rows
        self.forgotten: list[int] = [0] * rows  # committed tokens of a row that it holds no more
        self._room, self._slots = max(1, rows), STEP
        # [n, R, H, S, D] a group
        self._storage = [self._empty(group, self._room, STEP) for group in layout.groups.items()]
        self._rows: Sequence[int] = ()  # of the last block
        self._block: Sequence[Tensor] = ()  # [n, B, H, T, D] a group

    @property
    def memory(self) -> CacheMemory:
        held = sum(storage.nbytes for storage in self._storage)
        return CacheMemory(held, held * sum(self.lengths) // (self._room * self._slots))

    def past(self, rows: Sequence[int]) -> list[Tensor]:
        """What the graph is to see of these rows: `[B, H, S, D]` for the keys and values of every layer.

        Views wherever rows lie side by side, and are not much shorter than the longest of all.
        """
        slots = max(STEP, *(slots_before(self.lengths[row]) for row in rows))
        self._make_room(slots)
        side_by_side = list(rows) == list(range(rows[0], rows[0] + len(rows)))
        parts: list[Tensor] = [torch.empty(0)] * len(self._layout.shapes)
        for storage, places in zip(self._storage, self._layout.groups.values(), strict=True):
            seen = storage[:, rows[0] : rows[0] + len(rows)] if side_by_side else storage[:, list(rows)]
            if 2 * slots <= self._slots:
                seen = seen[:, :, :, :slots].contiguous()
            for place, part in zip(places, seen, strict=True):
                parts[place] = part
        return parts

    def hold(self, rows: Sequence[int], block: Sequence[Tensor]) -> None:
        """A block of these rows that has run; its keys and values `[n, B, H, T, D]` a group."""
        self._rows, self._block = rows, block

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        width = self._block[0].shape[3] if self._block else 0
        kept = list(zip(range(len(self._rows)), self._rows, paths, strict=True))
        for _, _, path in kept:
            if path and not 0 <= min(path) <= max(path) < width:
                raise TercelError(f"path {list(path)} leaves the block of {width} tokens just verified")
        self._make_room(max((slots_before(self.lengths[row] + len(path)) for _, row, path in kept), default=0))
        for place, row, path in kept:
            if not path:
                continue
            start, end = self.lengths[row], self.lengths[row] + len(path)
            there = slots_of(start, end)
            first = list(path) == list(range(len(path)))
            index = None if first else torch.tensor(list(path))
            for storage, block in zip(self._storage, self._block, strict=True):
                own = block[:, place]
                storage[:, row, :, there] = own[:, :, : len(path)] if index is None else own.index_select(2, index)
            self.lengths[row] = end

    def add_rows(self, count: int, capacity: int = 0) -> None:
        """Append empty rows; slots are made as they are needed, whatever `capacity` they may have one day."""
        rows = len(self.lengths) + count
        if rows > self._room:
            self._resize(max(rows, self._room * 3 // 2), self._slots)
        self.lengths += [0] * count
        self.forgotten += [0] * count

    def select_rows(self, rows: Sequence[int]) -> None:
        stay = next((place for place, row in enumerate(rows) if place != row), len(rows))
        for storage in self._storage:
            if stay < len(rows):
                storage[:, stay : len(rows)] = storage[:, list(rows[stay:])]
            storage[:, len(rows) : len(self.lengths)].zero_()  # what failed may have left NaN for whoever comes next
        self.lengths = [self.lengths[row] for row in rows]
        self.forgotten = [self.forgotten[row] for row in rows]
        self._shrink()

    def forget(self, row: int, first: int, count: int) -> None:
        """Let go of `count` committed tokens of a row, behind the first ones; those after them move up."""
        end = self.lengths[row] - count
        source, there = slots_of(first + count, self.lengths[row]), slots_of(first, end)
        for storage in self._storage:
            storage[:, row, :, there] = storage[:, row, :, source].clone()
        self.lengths[row] = end
        self.forgotten[row] += count
        self._shrink()

    def _shrink(self) -> None:
        needed = max((slots_before(length) for length in self.lengths), default=0)
        if needed < self._slots:
            self._resize(self._room, max(STEP, needed))

    def _make_room(self, slots: int) -> None:
        if slots > self._slots:
            self._resize(self._room, slots)

    def _resize(self, room: int, slots: int) -> None:
        """No more slots than the longest row needs: a block sees all of them, and must see as many in every batch."""
        rows, kept = len(self.lengths), min(self._slots, slots)
        for place, group in enumerate(self._layout.groups.items()):
            before, resized = self._storage[place], self._empty(group, room, slots)
            resized[:, :rows, :, :kept] = before[:, :rows, :, :kept]
            self._storage[place] = resized
        self._room, self._slots = room, slots

    def _empty(self, group: tuple[tuple[int, int], list[int]], room: int, slots: int) -> Tensor:
        (heads, size), places = group
        # zeros, not empty: masked slots still enter the product with weight 0, and 0 * NaN is NaN
        return torch.zeros(len(places), room, heads, slots, size, dtype=self._dtype)
