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

    def block(self, length: int) -> tuple[list[list[int]], list[tuple[Tensor, Tensor]]]:
        """Ids of the entries written a row, and what attention saw in every layer."""
        ids = [[self._next() for _ in range(length)] for _ in self.kept]
        span = self.cache.begin(length, CPU)
        assert span == max(map(len, self.kept)) + length
        seen = [self.cache.update(entries(ids, layer), -entries(ids, layer), layer) for layer in range(LAYERS)]
        return ids, seen

    def keep(self, ids: list[list[int]], paths: list[list[int]]) -> None:
        self.cache.keep(paths)
        for kept, row, path in zip(self.kept, ids, paths, strict=True):
            kept += [row[i] for i in path]

    def _next(self) -> int:
        self.count += 1
        return self.count


def entries(ids: list[list[int]], layer: int) -> Tensor:
    """`[B, heads, T, size]`, another number for every layer, head and entry."""
    base = torch.tensor(ids, dtype=torch.float32)[:, None, :, None]
    heads = torch.arange(HEADS)[None, :, None, None] * 0.25
    return (base + heads + 1000 * layer).expand(-1, -1, -1, SIZE)


def check(writer: Writer, ids: list[list[int]], seen: list[tuple[Tensor, Tensor]]) -> None:
    for layer, (keys, values) in enumerate(seen):
        for row, kept in enumerate(writer.kept):
            wanted = entries([kept + ids[row]], layer)[0]
            assert torch.equal(keys[row, :, : wanted.shape[1]], wanted)
            assert torch.equal(values[row, :, : wanted.shape[1]], -wanted)
        assert torch.isfinite(keys).all()


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_blocks_paths_and_rows(data):
    draw = data.draw
    writer = Writer(draw(st.integers(1, 3)), draw(st.integers(1, 4)))  # so small that it has to grow
    for _ in range(draw(st.integers(1, 5))):
        length = draw(st.integers(1, 4))
        ids, seen = writer.block(length)
        check(writer, ids, seen)
        paths = [
            draw(st.lists(st.integers(0, length - 1), max_size=length, unique=True).map(sorted)) for _ in writer.kept
        ]
        writer.keep(ids, paths)
        assert writer.cache.lengths == [len(kept) for kept in writer.kept]
        action = draw(st.sampled_from(["none", "select", "add"]))
        if action == "select":
            rows = draw(st.permutations(range(len(writer.kept))))[: draw(st.integers(1, len(writer.kept)))]
            writer.cache.select_rows(rows)
            writer.kept = [writer.kept[row] for row in rows]
        elif action == "add" and len(writer.kept) < 4:
            other = Writer(1, draw(st.integers(1, 6)))
            other.count = writer.count = writer.count + 50
            new, _ = other.block(draw(st.integers(1, 5)))
            other.keep(new, [list(range(len(new[0])))])
            writer.cache.add_row(other.cache)
            writer.kept.append(other.kept[0])
            writer.count += 50
    ids, seen = writer.block(2)
    check(writer, ids, seen)


@pytest.mark.parametrize("rows", [0, 2])
def test_a_row_can_join_a_cache_that_has_seen_no_block(rows):
    other = Writer(1, 4)
    ids, _ = other.block(3)
    other.keep(ids, [[0, 1, 2]])
    cache = TargetCache(rows, 2)
    cache.add_row(other.cache)
    assert cache.lengths == [0] * rows + [3]
    cache.begin(1, CPU)
    keys, _ = cache.update(torch.ones(rows + 1, HEADS, 1, SIZE), torch.ones(rows + 1, HEADS, 1, SIZE), 0)
    assert torch.equal(keys[rows, :, :3], entries(ids, 0)[0])
    assert (keys[:rows, :, 0] == 1).all()


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


def test_memory_is_counted():
    writer = Writer(2, 4)
    assert writer.cache.bytes() == 0
    writer.block(1)
    assert writer.cache.bytes() == 2 * LAYERS * 2 * HEADS * 4 * SIZE * 4
