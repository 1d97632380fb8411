"""The target's KV cache: append a block, keep one path of a tree, forget the rest.

Shape legend: B rows (requests) of a block, T block length, Hkv key/value heads, D head size, C slots a row has room
for, n keys and values of one shape.

Every row is filled from slot 0 without gaps: slot `s < lengths[row]` holds the committed token at position
`s`. A block that is being verified lies after that, from slot `lengths[row]` on, until `keep` makes a path
of it permanent. What is not kept needs no clearing: the next block overwrites it. Sliding-window layers keep
all slots too; their window is a matter of the mask, so that rolling back stays free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from tercel.errors import TercelError
from tercel.target_model.kept import KeptTokens
from tercel.target_model.memory import CacheMemory
from tercel.target_model.row_states import MaskPool, RowStates, padded
from tercel.target_model.transfer import to_device

SPARE, LEAST_SPARE = 12, 8  # a row that grows gets a twelfth more slots than it needs, and so many at least


class TargetCache(Cache):
    """Keys and values of every layer for `rows` requests, each with a length and a storage of its own.

    Handed to a stock `transformers` model as its `cache`: the attention layers call `update`, everything else
    is for the decoding loop. A row holds what it needs and a little more (`SPARE`), however long others are; a row that
    joins, grows or leaves copies no other.
    """

    def __init__(self, rows: int, capacity: int) -> None:
        super().__init__(layers=[])
        self.lengths: list[int] = []
        self.turned_for: list[int] = []  # how long a sequence the keys are rotated for (see `rope.py`)
        self.forgotten: list[int] = []  # committed tokens of a row that it holds no more: its positions go on
        self._storages: list[_RowStorage] = []
        self._layout: _Layout | None = None  # known when the first block has gone through all layers
        self._block = 0  # length of the block in flight
        self._rows: Sequence[int] = ()  # whose it is
        self._running: list[_RowStorage] = []  # the same rows'
        self._in_flight: dict[int, int] = {}  # by row: slots after the committed ones that are in use
        self._masks = MaskPool()
        self._starts: tuple[list[int], Tensor] | None = None
        self.add_rows(rows, capacity)

    @property
    def rows(self) -> int:
        return len(self.lengths)

    @property
    def memory(self) -> CacheMemory:
        used = 0
        for row, storage in enumerate(self._storages):
            slots = self.lengths[row] + self._in_flight.get(row, 0)
            used += storage.bytes * slots // storage.room if storage.room else 0
        return CacheMemory(sum(storage.bytes for storage in self._storages), used)

    def begin(self, block: int, device: torch.device, rows: Sequence[int] | None = None, uncommitted: int = 0) -> int:
        """Announce a block of `block` tokens for each of `rows` (all, if left out); returns `S`, the number of slots
        that attention will see.

        uncommitted: how many slots of earlier blocks, not committed yet, it is to leave untouched (a tree drafted
        level by level).
        """
        self._rows = rows = list(range(self.rows) if rows is None else rows)
        self._block, self._running = block, [self._storages[row] for row in rows]
        if self._layout is None:
            self._layout = _Layout.of(self._storages)
        for row, storage in zip(rows, self._running, strict=True):
            storage.open(self._layout, self.lengths[row] + uncommitted, block)
        self._in_flight, self._masks = dict.fromkeys(rows, uncommitted + block), MaskPool()
        return max(self.lengths[row] for row in rows) + uncommitted + block

    def starts(self, device: torch.device, rows: Sequence[int] | None = None) -> Tensor:
        """`lengths` (of some rows) on the device, long [B]; carried there once for as long as they stay the same."""
        lengths = self.lengths if rows is None else [self.lengths[row] for row in rows]
        if self._starts is None or self._starts[0] != lengths:
            self._starts = list(lengths), to_device(lengths, device)
        return self._starts[1]

    def positions(self, device: torch.device, rows: Sequence[int] | None = None) -> Tensor:
        """Of the next token of each row (or of some), long [B]."""
        starts = self.starts(device, rows)
        forgotten = self.forgotten if rows is None else [self.forgotten[row] for row in rows]
        return starts + to_device(forgotten, device) if any(forgotten) else starts

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the block's keys and values [B, Hkv, T, D]; return all slots its rows see: [B, Hkv, S, D] each.

        One row is a view of its storage, and so are many on a CPU (`RowStates`); elsewhere many are copied together,
        since one kernel for all of them is faster there than one each.
        """
        return self._write(2 * layer_idx, key_states), self._write(2 * layer_idx + 1, value_states)

    def _write(self, part: int, block: Tensor) -> Tensor:
        seen = [storage.write(part, own) for storage, own in zip(self._running, block.unbind(), strict=True)]
        if len(seen) == 1:
            return seen[0]
        return RowStates(seen, self._masks) if block.device.type == "cpu" else padded(seen)

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
            if list(path) != list(range(len(path))):  # a prefix lies where it belongs already
                self._storages[row].move(self.lengths[row], path)
            self.lengths[row] += len(path)
        self._in_flight = {}

    def add_rows(self, count: int, capacity: int = 0) -> None:
        """Append empty rows for sequences of up to `capacity` tokens; what is made in advance ends there, if it
        suffices."""
        self.lengths += [0] * count
        self.turned_for += [0] * count
        self.forgotten += [0] * count
        self._storages += [_RowStorage(capacity) for _ in range(count)]

    def forget(self, row: int, first: int, count: int) -> None:
        """Let go of `count` committed tokens of a row from slot `first` on; those after them move up."""
        self._storages[row].drop(first, count, self.lengths[row])
        self.lengths[row] -= count
        self.forgotten[row] += count

    def restart(self, row: int, turned_for: int) -> None:
        """Empty a row, to be filled again as a part of a sequence of `turned_for` tokens."""
        self.lengths[row], self.turned_for[row] = 0, turned_for

    def taken(self, row: int, start: int, end: int) -> KeptTokens:
        self._layout = self._layout or _Layout.of(self._storages)
        assert self._layout is not None  # of a row that holds tokens
        return KeptTokens(tuple(self._storages[row].slots(self._layout, start, end)), self._layout)

    def restore(self, kept: Mapping[int, Sequence[KeptTokens]]) -> None:
        for row, pieces in kept.items():
            storage = self._storages[row]
            self._layout = self._layout or pieces[0].form
            storage.open(self._layout, self.lengths[row], sum(map(len, pieces)))
            for piece in pieces:
                storage.fill(self.lengths[row], piece.tensors)
                self.lengths[row] += len(piece)

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep only `rows`, in that order (finished requests leave the batch)."""
        self.lengths = [self.lengths[row] for row in rows]
        self.turned_for = [self.turned_for[row] for row in rows]
        self.forgotten = [self.forgotten[row] for row in rows]
        self._storages = [self._storages[row] for row in rows]
        self._rows, self._running, self._in_flight = (), [], {}

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return max((self.lengths[row] for row in self._rows), default=0)


class _Layout:
    """Which keys and values (part `2 * layer` and the next) have one shape, so that a row holds them in one tensor."""

    def __init__(self, parts: Sequence[Tensor | None]) -> None:
        self.count = len(parts)
        self.groups: dict[tuple[Any, ...], list[int]] = {}
        for number, part in enumerate(parts):
            if part is not None:
                kind = (part.shape[0], part.shape[2], part.dtype, part.device)
                self.groups.setdefault(kind, []).append(number)

    @classmethod
    def of(cls, storages: Sequence[_RowStorage]) -> _Layout | None:
        """That of the first row which holds anything."""
        return next((cls(storage.parts) for storage in storages if storage.parts), None)

    def empty(self, room: int) -> list[Tensor]:
        """`[n, Hkv, C, D]` a group."""
        return [
            torch.empty(len(numbers), heads, room, size, dtype=dtype, device=device)
            for (heads, size, dtype, device), numbers in self.groups.items()
        ]


class _RowStorage:
    """Keys and values of one row: `[n, Hkv, C, D]` for all parts of a shape, or, before all layers are known, a tensor
    for each. capacity: where what is made in advance ends, if that suffices."""

    def __init__(self, capacity: int) -> None:
        self.room = 0
        self.parts: list[Tensor | None] = []  # a part: [Hkv, C, D]
        self._capacity = capacity
        self._stacks: list[Tensor] = []
        self._from = self._to = 0  # slots of the block in flight
        self._block: list[Tensor] = []  # a part: the block's slots [Hkv, T, D]
        self._seen: list[Tensor] = []  # a part: all slots that the block sees [1, Hkv, S, D]

    @property
    def bytes(self) -> int:
        return sum(part.nbytes for part in self.parts if part is not None)

    def open(self, layout: _Layout | None, start: int, block: int) -> None:
        """Make ready for a block of so many tokens at slot `start`, behind slots that stay."""
        self._from, self._to = start, start + block
        short = self._to > self.room
        if short:
            ample = self._to + max(LEAST_SPARE, self._to // SPARE)
            self.room = min(ample, self._capacity) if self._to <= self._capacity else ample
        if layout is None:
            return
        if short or not self._stacks:
            self._settle(layout, start)
        self._block, self._seen = ([torch.empty(0)] * layout.count for _ in range(2))
        for stack, numbers in zip(self._stacks, layout.groups.values(), strict=True):
            views = stack.narrow(2, start, block).unbind(), stack.narrow(2, 0, self._to)[:, None].unbind()
            for number, own, seen in zip(numbers, *views, strict=True):
                self._block[number], self._seen[number] = own, seen

    def write(self, part: int, block: Tensor) -> Tensor:
        """Write `[Hkv, T, D]`; returns all slots that it sees `[1, Hkv, S, D]`."""
        if not self._stacks:
            return self._write_first(part, block)
        self._block[part].copy_(block)
        return self._seen[part]

    def _write_first(self, part: int, block: Tensor) -> Tensor:
        self.parts += [None] * (part + 1 - len(self.parts))
        storage = self.parts[part] = block.new_empty(block.shape[0], self.room, block.shape[2])
        storage[:, self._from : self._to] = block
        return storage[None, :, : self._to]

    def _settle(self, layout: _Layout, slots: int) -> None:
        """Move into tensors of the present room, with the first `slots`."""
        before, self.parts, self._stacks = self.parts, [None] * layout.count, layout.empty(self.room)
        for stack, numbers in zip(self._stacks, layout.groups.values(), strict=True):
            for number, part in zip(numbers, stack.unbind(), strict=True):
                self.parts[number] = part
                old = before[number] if before else None
                if old is not None and slots:
                    part[:, :slots] = old[:, :slots]

    def slots(self, layout: _Layout, start: int, end: int) -> list[Tensor]:
        """`[n, Hkv, t, D]` a group; views, once all layers are known."""
        if self._stacks:
            return [stack[:, :, start:end] for stack in self._stacks]
        groups = ([self.parts[number] for number in numbers] for numbers in layout.groups.values())
        return [torch.stack([part[:, start:end] for part in group if part is not None]) for group in groups]

    def fill(self, start: int, tensors: Sequence[Tensor]) -> None:
        """Write `[n, Hkv, t, D]` a group from slot `start` on, where room is."""
        for stack, own in zip(self._stacks, tensors, strict=True):
            stack.narrow(2, start, own.shape[2]).copy_(own)

    def move(self, start: int, path: Sequence[int]) -> None:
        """Let the block's tokens `path` lie one after another from slot `start` on."""
        source: Tensor | None = None
        for states, dim in self._movable():
            source = to_device(path, states.device) + start if source is None else source
            states.narrow(dim, start, len(path)).copy_(states.index_select(dim, source))

    def drop(self, first: int, count: int, length: int) -> None:
        """Take `count` slots from `first` on out of the `length` in use."""
        for states, dim in self._movable():
            states.narrow(dim, first, length - first - count).copy_(
                states.narrow(dim, first + count, length - first - count).clone()
            )

    def _movable(self) -> list[tuple[Tensor, int]]:
        """What holds slots, and in which dimension."""
        if self._stacks:
            return [(stack, 2) for stack in self._stacks]
        return [(part, 1) for part in self.parts if part is not None]
