"""The OpenVINO target's cache: committed keys and values alone, which the graph reads where they lie.

A block's own keys and values come out of the graph beside them. So rolling back costs nothing, and keeping a path
copies that path, in all layers at once, and nothing else. Which slot a token gets is `places.py`'s affair; which rows
lie side by side, and run together, that of `shelves.py`.

Shape legend: B rows of a run, T block length, H key/value heads, S slots, D head size, n keys or values of one shape
(`Layout.groups`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tercel.errors import TercelError
from tercel.target_model.kept import KeptTokens
from tercel.target_model.memory import CacheMemory
from tercel.target_model.openvino.graph import Layout
from tercel.target_model.openvino.places import BLOCK, STEP, slots_before, slots_of
from tercel.target_model.openvino.shelves import Shelf, arranged

Run = tuple[Sequence[int], Sequence[Tensor]]  # places in a block's rows; their keys and values [n, B, H, T, D] a group


class SlotCache:
    """A `RowCache`: slot `places.slot(p)` of a row holds its committed token at position `p`.

    run: how many slots' attention takes as long as another run of the graph; without it all rows run together, whatever
    their lengths.
    """

    def __init__(self, layout: Layout, dtype: torch.dtype, rows: int, run: float | None = None) -> None:
        self._layout, self._dtype, self._run = layout, dtype, run
        self.lengths: list[int] = []
        self.forgotten: list[int] = []  # committed tokens of a row that it holds no more
        self._shelves: list[Shelf] = []
        self._at: dict[int, tuple[Shelf, int]] = {}  # where each row lies
        self._needs: list[int] | None = []  # slots of each row, for which all this was arranged; None: for other rows
        self._rows: Sequence[int] = ()  # of the last block
        self._runs: Sequence[Run] = ()
        self.add_rows(rows)

    @property
    def memory(self) -> CacheMemory:
        used = 0
        for shelf in self._shelves:
            used += shelf.nbytes * sum(self.lengths[row] for row in shelf.rows) // (shelf.room * shelf.slots)
        return CacheMemory(sum(shelf.nbytes for shelf in self._shelves), used)

    def runs(self, rows: Sequence[int], block: int = 1) -> list[list[int]]:
        """Places in `rows`, those together that run together, in the order in which they lie. block: its tokens; a wide
        one would come to lie in another chunk behind more slots than a row needs."""
        places = {row: place for place, row in enumerate(rows)}
        found = [[places[row] for row in shelf.rows if row in places] for shelf in self._shelves]
        if block > BLOCK:
            apart = [defaultdict[int, list[int]](list) for _ in found]
            for run, by_slots in zip(found, apart, strict=True):
                for place in run:
                    by_slots[slots_before(self.lengths[rows[place]])].append(place)
            found = [run for by_slots in apart for run in by_slots.values()]
        return [run for run in found if run]

    def past(self, rows: Sequence[int], block: int = 1) -> list[Tensor]:
        """What the graph is to see of these rows, of one run of `runs`: `[B, H, S, D]` for the keys and values of every
        layer. Views wherever they lie side by side, unless the block is wide."""
        shelf, first = self._at[rows[0]]
        places = [self._at[row][1] for row in rows]
        side_by_side = places == list(range(first, first + len(rows)))
        index: slice | list[int] = slice(first, first + len(rows)) if side_by_side else places
        parts: list[Tensor] = [torch.empty(0)] * len(self._layout.shapes)
        for storage, numbers in zip(shelf.storage, self._layout.groups.values(), strict=True):
            for number, part in zip(numbers, storage[:, index], strict=True):
                parts[number] = part
        if block > BLOCK:
            slots = max(STEP, slots_before(self.lengths[rows[0]]))
            parts = [part[:, :, :slots].contiguous() for part in parts]
        return parts

    def hold(self, rows: Sequence[int], runs: Sequence[Run]) -> None:
        """A block of these rows that has run."""
        self._rows, self._runs = rows, runs

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        width = self._runs[0][1][0].shape[3] if self._runs else 0
        for path in paths:
            if path and not 0 <= min(path) <= max(path) < width:
                raise TercelError(f"path {list(path)} leaves the block of {width} tokens just verified")
        starts = list(self.lengths)
        for row, path in zip(self._rows, paths, strict=True):
            self.lengths[row] += len(path)
        self._arrange()
        for places, block in self._runs:
            for number, place in enumerate(places):
                self._write(self._rows[place], starts[self._rows[place]], paths[place], [p[:, number] for p in block])

    def _write(self, row: int, start: int, path: Sequence[int], block: Sequence[Tensor]) -> None:
        """block: `[n, H, T, D]` a group."""
        if not path:
            return
        shelf, at = self._at[row]
        there = slots_of(start, start + len(path))
        index = None if list(path) == list(range(len(path))) else torch.tensor(list(path))
        for storage, own in zip(shelf.storage, block, strict=True):
            storage[:, at, :, there] = own[:, :, : len(path)] if index is None else own.index_select(2, index)

    def add_rows(self, count: int, capacity: int = 0) -> None:
        """Append empty rows; slots are made as they are needed, whatever `capacity` they may have one day."""
        self.lengths += [0] * count
        self.forgotten += [0] * count
        self._arrange()

    def taken(self, row: int, start: int, end: int) -> KeptTokens:
        shelf, at = self._at[row]
        there = slots_of(start, end) if end > start else slice(0)
        return KeptTokens(tuple(storage[:, at, :, there] for storage in shelf.storage))

    def restore(self, kept: Mapping[int, Sequence[KeptTokens]]) -> None:
        starts = list(self.lengths)
        for row, pieces in kept.items():
            self.lengths[row] += sum(map(len, pieces))
        self._arrange()  # once for all of them
        for row, pieces in kept.items():
            (shelf, at), start = self._at[row], starts[row]
            for piece in pieces:
                there = slots_of(start, start + len(piece))
                for storage, own in zip(shelf.storage, piece.tensors, strict=True):
                    storage[:, at, :, there] = own
                start += len(piece)

    def select_rows(self, rows: Sequence[int]) -> None:
        numbers = {row: number for number, row in enumerate(rows)}
        for shelf in self._shelves:
            shelf.rows = [numbers.get(row, _GONE) for row in shelf.rows]
        self.lengths = [self.lengths[row] for row in rows]
        self.forgotten = [self.forgotten[row] for row in rows]
        self._rows, self._runs, self._needs = (), (), None
        self._arrange()

    def forget(self, row: int, first: int, count: int) -> None:
        """Let go of `count` committed tokens of a row, behind the first ones; those after them move up."""
        end = self.lengths[row] - count
        source, there = slots_of(first + count, self.lengths[row]), slots_of(first, end)
        shelf, at = self._at[row]
        for storage in shelf.storage:
            storage[:, at, :, there] = storage[:, at, :, source].clone()
        self.lengths[row] = end
        self.forgotten[row] += count
        self._arrange()

    def _arrange(self) -> None:
        """Let rows lie as their lengths ask for: a group on the shelf that has most of it, which copies no other."""
        needs = [slots_before(length) for length in self.lengths]
        if needs == self._needs:
            return
        self._needs, every = needs, range(len(needs))
        groups = [list(every)][: len(every)] if self._run is None else arranged(self.lengths, self._run)
        at = {row: (shelf, place) for shelf in self._shelves for place, row in enumerate(shelf.rows) if row != _GONE}
        free, shelves = list(self._shelves), list[Shelf]()
        for group in groups:
            held = Counter(id(at[row][0]) for row in group if row in at)
            shelf = max(free, key=lambda shelf: held[id(shelf)], default=None)
            if shelf is None or not held[id(shelf)]:
                shelf = Shelf(self._layout, self._dtype)
            else:
                free.remove(shelf)
            shelves.append(shelf)
        coming = {
            row: at[row][0].taken(at[row][1], at[row][0].slots)
            for group, shelf in zip(groups, shelves, strict=True)
            for row in group
            if row in at and at[row][0] is not shelf
        }
        for group, shelf in zip(groups, shelves, strict=True):
            shelf.hold(group, max(STEP, *(needs[row] for row in group)), coming)
        self._shelves = shelves
        self._at = {row: (shelf, place) for shelf in shelves for place, row in enumerate(shelf.rows)}


_GONE = -1
