"""The cache against a list of kept entries a row, through random blocks, paths, rows that come and go."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tercel.errors import TercelError
from tercel.target_model.cache import TargetCache

CPU = torch.device("cpu")
LAYERS, HEADS, SIZE = 2, 2, 3


class Writer:
    """Writes numbered entries into a cache and remembers which a row should hold."""

    def __init__(self, rows: int, capacity: int) -> None:
        self.cache = TargetCache(rows, capacity)
        self.kept: list[list[int]] = [[] for _ in range(rows)]
        self.count = 0

    def block(self, length: int, rows: list[int] | None = None) -> tuple[list[list[int]], list[tuple[Tensor, Tensor]]]:
        """Ids of the entries written for each of `rows` (all, if left out), and what attention saw in every layer."""
        rows = list(range(len(self.kept))) if rows is None else rows
        ids = [[self._next() for _ in range(length)] for _ in rows]
        span = self.cache.begin(length, CPU, rows)
        assert span == max(len(self.kept[row]) for row in rows) + length
        seen = [self.cache.update(entries(ids, layer), -entries(ids, layer), layer) for layer in range(LAYERS)]
        return ids, seen

    def keep(self, ids: list[list[int]], paths: list[list[int]], rows: list[int] | None = None) -> None:
        self.cache.keep(paths)
        rows = list(range(len(self.kept))) if rows is None else rows
        for row, new, path in zip(rows, ids, paths, strict=True):
            self.kept[row] += [new[i] for i in path]

    def _next(self) -> int:
        self.count += 1
        return self.count


def entries(ids: list[list[int]], layer: int) -> Tensor:
    """`[B, heads, T, size]`, another number for every layer, head and entry."""
    base = torch.tensor(ids, dtype=torch.float32)[:, None, :, None]
    heads = torch.arange(HEADS)[None, :, None, None] * 0.25
    return (base + heads + 1000 * layer).expand(-1, -1, -1, SIZE)


def check(writer: Writer, ids: list[list[int]], seen: list[tuple[Tensor, Tensor]], rows: list[int]) -> None:
    for layer, (keys, values) in enumerate(seen):
        assert len(keys) == len(values) == len(rows)
        for place, row in enumerate(rows):
            wanted = entries([writer.kept[row] + ids[place]], layer)[0]
            assert torch.equal(keys[place, :, : wanted.shape[1]], wanted)
            assert torch.equal(values[place, :, : wanted.shape[1]], -wanted)
        assert torch.isfinite(keys).all()


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_blocks_paths_and_rows(data):
    draw = data.draw
    writer = Writer(draw(st.integers(1, 3)), draw(st.integers(1, 4)))  # so small that it has to grow
    for _ in range(draw(st.integers(1, 6))):
        length, everyone = draw(st.integers(1, 4)), range(len(writer.kept))
        rows = draw(st.permutations(everyone))[: draw(st.integers(1, len(writer.kept)))]
        rows = draw(st.sampled_from([list(everyone), sorted(rows), rows]))
        ids, seen = writer.block(length, rows)
        check(writer, ids, seen, rows)
        paths = [draw(st.lists(st.integers(0, length - 1), max_size=length, unique=True).map(sorted)) for _ in rows]
        writer.keep(ids, paths, rows)
        assert writer.cache.lengths == [len(kept) for kept in writer.kept]
        action = draw(st.sampled_from(["none", "select", "add"]))
        if action == "select":
            stay = draw(st.permutations(everyone))[: draw(st.integers(1, len(writer.kept)))]
            writer.cache.select_rows(stay)
            writer.kept = [writer.kept[row] for row in stay]
        elif action == "add" and len(writer.kept) < 5:
            new = draw(st.integers(1, 2))
            writer.cache.add_rows(new, draw(st.integers(0, 6)))
            writer.kept += [[] for _ in range(new)]
    ids, seen = writer.block(2)
    check(writer, ids, seen, list(range(len(writer.kept))))


def storages(cache: TargetCache) -> list[Tensor]:
    return [storage for storage in (*cache._keys, *cache._values) if storage is not None]


def test_a_row_that_joins_is_written_where_it_stays_and_copies_no_other():
    """Only a cache that has no room left moves what it holds, by half more each time."""
    writer = Writer(1, 8)
    ids, _ = writer.block(3)
    writer.keep(ids, [[0, 1, 2]])
    moved = 0
    for row in range(1, 30):
        before = [storage.data_ptr() for storage in storages(writer.cache)]
        writer.cache.add_rows(1)
        writer.kept.append([])
        ids, seen = writer.block(3, [row])
        check(writer, ids, seen, [row])
        writer.keep(ids, [[0, 1, 2]], [row])
        now = [storage.data_ptr() for storage in storages(writer.cache)]
        assert now == before or not set(now) & set(before)
        moved += now != before
        assert seen[0][0].untyped_storage().data_ptr() == storages(writer.cache)[0].untyped_storage().data_ptr()
    assert moved < 12
    ids, seen = writer.block(1)
    check(writer, ids, seen, list(range(30)))


def test_what_a_row_leaves_behind_is_gone_when_another_takes_its_place():
    """Masked slots still enter the product with weight 0, and 0 * NaN is NaN."""
    writer = Writer(3, 8)
    writer.cache.begin(4, CPU)
    block = torch.ones(3, HEADS, 4, SIZE)
    block[2] = float("nan")
    writer.cache.update(block, block, 0)
    writer.cache.keep([[0, 1, 2, 3]] * 3)
    writer.cache.select_rows([0, 1])
    writer.cache.add_rows(1)
    writer.cache.begin(1, CPU)
    keys, values = writer.cache.update(torch.ones(3, HEADS, 1, SIZE), torch.ones(3, HEADS, 1, SIZE), 0)
    assert keys.isfinite().all()
    assert values.isfinite().all()


def test_uncommitted_blocks_stay_where_a_later_one_is_to_lie_behind_them():
    writer = Writer(2, 4)
    ids, _ = writer.block(2)
    writer.keep(ids, [[0, 1], [0]])
    first = [[101, 102], [201, 202]]
    second = [[103], [203]]
    writer.cache.begin(2, CPU)
    writer.cache.update(entries(first, 0), entries(first, 0), 0)
    assert writer.cache.begin(1, CPU, uncommitted=2) == 5
    keys, _ = writer.cache.update(entries(second, 0), entries(second, 0), 0)
    for row, kept in enumerate(writer.kept):
        wanted = entries([kept + first[row] + second[row]], 0)[0]
        assert torch.equal(keys[row, :, : wanted.shape[1]], wanted)


@pytest.mark.parametrize("path", [[0, 2], [-1]])
def test_a_path_outside_the_block_is_refused(path):
    writer = Writer(1, 4)
    writer.block(2)
    with pytest.raises(TercelError, match="leaves the block of 2 tokens"):
        writer.cache.keep([path])
