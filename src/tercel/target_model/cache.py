"""The target's KV cache: append a block, keep one path of a tree, forget the rest.

Shape legend: B rows (requests), T block length, Hkv key/value heads, D head size, S slots.

Every row is filled from slot 0 without gaps: slot `s < lengths[row]` holds the committed token at position
`s`. A block that is being verified lies after that, from slot `lengths[row]` on, until `keep` makes a path
of it permanent. What is not kept needs no clearing: the next block overwrites it. Sliding-window layers keep
all slots too; their window is a matter of the mask, so that rolling back stays free.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import Cache

from tercel.errors import TercelError
from tercel.target_model.transfer import to_device


class RowCache(Protocol):
    """What the decoding loop needs of a target's cache; `lengths` are the committed tokens of each row."""

    lengths: list[int]

    def keep(self, paths: Sequence[Sequence[int]]) -> None: ...
    def add_row(self, other: Any) -> None: ...
    def select_rows(self, rows: Sequence[int]) -> None: ...


class TargetCache(Cache):
    """Keys and values of every layer for `rows` requests, each with a length of its own.

    Handed to a stock `transformers` model as its `cache`: the attention layers call `update`, everything else
    is for the decoding loop. Storage is made at the first block (only then are the layers' shapes known) and
    grows when a block does not fit.
    """

    def __init__(self, rows: int, capacity: int) -> None:
        super().__init__(layers=[])
        self.rows = rows
        self.capacity = capacity
        self.lengths: list[int] = [0] * rows
        self.turned_for: list[int] = [0] * rows  # how long a sequence the keys are rotated for (see `rope.py`)
        self._keys: list[Tensor | None] = []  # a layer: [B, Hkv, capacity, D]
        self._values: list[Tensor | None] = []
        self._block = 0  # length of the block in flight
        self._uncommitted = 0  # slots before it that are not committed either
        self._slots: Tensor | None = None  # [B, T], where rows differ in length
        self._starts: tuple[list[int], Tensor] | None = None
        self._span = 0

    def begin(self, block: int, device: torch.device, uncommitted: int = 0) -> int:
        """Announce a block of `block` tokens a row; returns `S`, the number of slots attention will see.

        uncommitted: how many slots of earlier blocks, not committed yet, it is to leave untouched (a tree drafted
        level by level).
        """
        self._span = max(self.lengths) + uncommitted + block
        if self._span > self.capacity:
            self._grow(max(self._span, self.capacity * 3 // 2))
        self._block = block
        self._uncommitted = uncommitted
        uniform = len(set(self.lengths)) == 1
        self._slots = (
            None
            if uniform
            else self.starts(device)[:, None] + uncommitted + torch.arange(block, device=device)
        )
        return self._span

    def starts(self, device: torch.device) -> Tensor:
        """`lengths` on the device, long [B]; carried there once for as long as they stay the same."""
        if self._starts is None or self._starts[0] != self.lengths:
            self._starts = list(self.lengths), to_device(self.lengths, device)
        return self._starts[1]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the block's keys and values [B, Hkv, T, D]; return all slots seen: [B, Hkv, S, D] each."""
        while len(self._keys) <= layer_idx:
            self._keys.append(None)
            self._values.append(None)
        keys = self._keys[layer_idx] = self._store(self._keys[layer_idx], key_states)
        values = self._values[layer_idx] = self._store(self._values[layer_idx], value_states)
        return keys[:, :, : self._span], values[:, :, : self._span]

    def _store(self, storage: Tensor | None, block: Tensor) -> Tensor:
        if storage is None:
            # zeros, not empty: masked slots still enter the product with weight 0, and 0 * NaN is NaN
            storage = block.new_zeros(self.rows, block.shape[1], self.capacity, block.shape[3])
        if self._slots is None:
            start = self.lengths[0] + self._uncommitted
            storage[:, :, start : start + self._block] = block
        else:
            rows = torch.arange(self.rows, device=block.device)[:, None]
            storage[rows, :, self._slots] = block.transpose(1, 2)
        return storage

    def _grow(self, capacity: int) -> None:
        def wider(storage: Tensor | None) -> Tensor | None:
            if storage is None:
                return None
            grown = storage.new_zeros(*storage.shape[:2], capacity, storage.shape[3])
            grown[:, :, : storage.shape[2]] = storage
            return grown

        self._keys = [wider(storage) for storage in self._keys]
        self._values = [wider(storage) for storage in self._values]
        self.capacity = capacity

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """Make a path of the last block permanent.

        `paths[row]` are block indices in path order; `[]` keeps none.
        Raises `TercelError` if a path names an index outside the block.
        """
        for row, path in enumerate(paths):
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

    def add_row(self, other: TargetCache) -> None:
        """Append the only row of `other` (a prefilled request) as the last row."""
        if other.capacity > self.capacity:
            self._grow(other.capacity)
        for mine, theirs in ((self._keys, other._keys), (self._values, other._values)):
            mine += [None] * (len(theirs) - len(mine))  # a cache that has seen no block yet
            for layer, source in enumerate(theirs):
                if source is None:
                    continue
                storage = mine[layer]
                if storage is None:
                    storage = source.new_zeros(self.rows, source.shape[1], self.capacity, source.shape[3])
                row = storage.new_zeros(1, *storage.shape[1:])
                row[:, :, : other.lengths[0]] = source[:, :, : other.lengths[0]]
                mine[layer] = torch.cat([storage, row])
        self.lengths.append(other.lengths[0])
        self.turned_for.append(other.turned_for[0])
        self.rows += 1

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep only `rows`, in that order (finished requests leave the batch)."""
        kept: Tensor | None = None
        for storages in (self._keys, self._values):
            for layer, storage in enumerate(storages):
                if storage is not None:
                    kept = to_device(list(rows), storage.device).long() if kept is None else kept
                    storages[layer] = storage.index_select(0, kept)
        self.lengths = [self.lengths[row] for row in rows]
        self.turned_for = [self.turned_for[row] for row in rows]
        self.rows = len(rows)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return max(self.lengths)

    def bytes(self) -> int:
        """Memory held by keys and values, in bytes."""
        return sum(s.numel() * s.element_size() for s in (*self._keys, *self._values) if s is not None)
