"""The target's KV cache: append a block, keep one path of a tree, forget the rest.

Shape legend: B rows (requests) of a block, T block length, Hkv key/value heads, D head size, S slots.

Every row is filled from slot 0 without gaps: slot `s < lengths[row]` holds the committed token at position
`s`. A block that is being verified lies after that, from slot `lengths[row]` on, until `keep` makes a path
of it permanent. What is not kept needs no clearing: the next block overwrites it. Sliding-window layers keep
all slots too; their window is a matter of the mask, so that rolling back stays free.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from tercel.errors import TercelError
from tercel.target_model.transfer import to_device


class TargetCache(Cache):
    """Keys and values of every layer for `rows` requests, each with a length of its own.

    Handed to a stock `transformers` model as its `cache`: the attention layers call `update`, everything else
    is for the decoding loop. Storage is made at the first block (only then are the layers' shapes known), with room for
    `room` rows of `capacity` slots, of which those past the last row are zero; it grows by half where that does not do.
    A row that joins or leaves copies no other but those that move up.
    """

    def __init__(self, rows: int, capacity: int) -> None:
        super().__init__(layers=[])
        self.room = rows
        self.capacity = capacity
        self.lengths: list[int] = [0] * rows
        self.turned_for: list[int] = [0] * rows  # how long a sequence the keys are rotated for (see `rope.py`)
        self._keys: list[Tensor | None] = []  # a layer: [room, Hkv, capacity, D]
        self._values: list[Tensor | None] = []
        self._block = 0  # length of the block in flight
        self._rows: Sequence[int] = ()  # whose it is
        self._part: slice | None = None  # the same rows, where they lie side by side
        self._index = torch.empty(0)  # the same rows, long [B], where they or their slots differ
        self._slots: int | Tensor = 0  # where the block begins, or [B, T] where that differs
        self._starts: tuple[list[int], Tensor] | None = None
        self._span = 0

    @property
    def rows(self) -> int:
        return len(self.lengths)

    def begin(self, block: int, device: torch.device, rows: Sequence[int] | None = None, uncommitted: int = 0) -> int:
        """Announce a block of `block` tokens for each of `rows` (all, if left out); returns `S`, the number of slots
        that attention will see.

        uncommitted: how many slots of earlier blocks, not committed yet, it is to leave untouched (a tree drafted
        level by level).
        """
        self._rows = rows = range(self.rows) if rows is None else rows
        lengths = [self.lengths[row] for row in rows]
        self._span = max(lengths) + uncommitted + block
        if self._span > self.capacity:
            self._grow(self.room, max(self._span, self.capacity * 3 // 2))
        self._block = block
        first, last = rows[0], rows[0] + len(rows)
        self._part = slice(first, last) if list(rows) == list(range(first, last)) else None
        uniform = len(set(lengths)) == 1
        if self._part is None:
            self._index = to_device(list(rows), device)
        elif not uniform:
            self._index = torch.arange(first, last, device=device)
        self._slots = (
            lengths[0] + uncommitted
            if uniform
            else self.starts(device, rows)[:, None] + uncommitted + torch.arange(block, device=device)
        )
        return self._span

    def starts(self, device: torch.device, rows: Sequence[int] | None = None) -> Tensor:
        """`lengths` (of some rows) on the device, long [B]; carried there once for as long as they stay the same."""
        lengths = self.lengths if rows is None else [self.lengths[row] for row in rows]
        if self._starts is None or self._starts[0] != lengths:
            self._starts = list(lengths), to_device(lengths, device)
        return self._starts[1]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the block's keys and values [B, Hkv, T, D]; return all slots its rows see: [B, Hkv, S, D] each."""
        while len(self._keys) <= layer_idx:
            self._keys.append(None)
            self._values.append(None)
        keys = self._keys[layer_idx] = self._store(self._keys[layer_idx], key_states)
        values = self._values[layer_idx] = self._store(self._values[layer_idx], value_states)
        return self._seen(keys), self._seen(values)

    def _store(self, storage: Tensor | None, block: Tensor) -> Tensor:
        if storage is None:
            # zeros, not empty: masked slots still enter the product with weight 0, and 0 * NaN is NaN
            storage = block.new_zeros(self.room, block.shape[1], self.capacity, block.shape[3])
        if isinstance(self._slots, Tensor):
            storage[self._index[:, None], :, self._slots] = block.transpose(1, 2)
        else:
            rows = self._index if self._part is None else self._part
            storage[rows, :, self._slots : self._slots + self._block] = block
        return storage

    def _seen(self, storage: Tensor) -> Tensor:
        slots = storage[:, :, : self._span]
        return slots.index_select(0, self._index) if self._part is None else slots[self._part]

    def _grow(self, room: int, capacity: int) -> None:
        def wider(storage: Tensor | None) -> Tensor | None:
            if storage is None:
                return None
            grown = storage.new_zeros(room, storage.shape[1], capacity, storage.shape[3])
            grown[: self.rows, :, : storage.shape[2]] = storage[: self.rows]
            return grown

        self._keys = [wider(storage) for storage in self._keys]
        self._values = [wider(storage) for storage in self._values]
        self.room, self.capacity = room, capacity

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """Make a path of the last block permanent in each of its rows.

        A path is block indices in order; `[]` keeps none.
        Raises `TercelError` if a path names an index outside the block.
        """
        for row, path in zip(self._rows, paths, strict=True):
            if not path:
                continue
            if min(path) < 0 or max(path) >= self._block:
                raise TercelError(f"path {list(path)} leaves the block of {self._block} tokens just verified")
            start = self.lengths[row]
            if list(path) != list(range(len(path))):  # a prefix lies where it belongs already
                self._move(row, start, path)
            self.lengths[row] = start + len(path)

    def _move(self, row: int, start: int, path: Sequence[int]) -> None:
        source: Tensor | None = None
        for storage in (*self._keys, *self._values):
            if storage is not None:
                source = to_device(path, storage.device) + start if source is None else source
                storage[row, :, start : start + len(path)] = storage[row].index_select(1, source)

    def add_rows(self, count: int, capacity: int = 0) -> None:
        """Append empty rows for sequences of up to `capacity` tokens."""
        rows, capacity = self.rows + count, max(capacity, self.capacity)
        if rows > self.room or capacity > self.capacity:
            self._grow(max(rows, self.room * 3 // 2) if rows > self.room else self.room, capacity)
        self.lengths += [0] * count
        self.turned_for += [0] * count

    def restart(self, row: int, turned_for: int) -> None:
        """Empty a row, to be filled again as a part of a sequence of `turned_for` tokens."""
        self.lengths[row], self.turned_for[row] = 0, turned_for

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep only `rows`, in that order (finished requests leave the batch)."""
        stay = next((place for place, row in enumerate(rows) if place != row), len(rows))
        moved: Tensor | None = None
        for storage in (*self._keys, *self._values):
            if storage is None:
                continue
            if stay < len(rows):
                moved = to_device(list(rows[stay:]), storage.device) if moved is None else moved
                storage[stay : len(rows)] = storage.index_select(0, moved)
            storage[len(rows) : self.rows].zero_()  # what failed may have left NaN for whoever comes next
        self.lengths = [self.lengths[row] for row in rows]
        self.turned_for = [self.turned_for[row] for row in rows]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return max((self.lengths[row] for row in self._rows), default=0)
