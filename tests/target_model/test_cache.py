"""The cache against a list of kept entries a row, through random blocks, paths, rows that come and go."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tercel.errors import TercelError
from tercel.target_model.cache import TargetCache
from tercel.target_model.memory import CacheMemory
from tercel.target_model.row_states import RowStates

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


class Copies(TorchDispatchMode):
    """Bytes that are written into copies of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.__name__.split(".")[0] in ("copy_", "clone", "cat", "stack", "index_select", "_to_copy", "index"):
            self.bytes += out.nbytes
        return out


def test_a_row_that_joins_grows_or_leaves_copies_no_other():
    writer = Writer(1, 1000)
    ids, _ = writer.block(200)
    writer.keep(ids, [list(range(200))])
    entry = 2 * LAYERS * HEADS * SIZE * 4  # bytes of a token's keys and values
    for row in range(1, 8):
        writer.cache.add_rows(1, 1000)
        writer.kept.append([])
        for length in (3, 20, 2):
            with Copies() as copies:
                ids, seen = writer.block(length, [row])
            check(writer, ids, seen, [row])
            assert copies.bytes <= (len(writer.kept[row]) + length) * entry  # of itself, and only where it grows
            writer.keep(ids, [list(range(length))], [row])
    with Copies() as copies:
        writer.cache.select_rows([0, 2, 5])
    assert not copies.bytes
    writer.kept = [writer.kept[row] for row in (0, 2, 5)]
    ids, seen = writer.block(1)
    check(writer, ids, seen, [0, 1, 2])


def test_a_block_of_rows_that_have_room_writes_itself_and_nothing_else():
    """Nor does what attention sees become one tensor, padded to the longest row, unless somebody computes with it."""
    writer = Writer(3, 4096)
    for row, length in enumerate((1500, 40, 90)):
        ids, _ = writer.block(length, [row])
        writer.keep(ids, [list(range(length))], [row])
    writer.block(4)  # makes room
    entry = 2 * LAYERS * HEADS * SIZE * 4
    with Copies() as copies:
        ids, seen = writer.block(4)
    assert copies.bytes == 3 * 4 * entry
    check(writer, ids, seen, [0, 1, 2])
    with Copies() as copies:
        writer.keep(ids, [[0, 2, 3], [0, 1], [1]])
    assert copies.bytes == 2 * (3 + 1) * entry  # the paths that are no prefixes: taken from their places and put there


@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_rows_of_unlike_lengths_waste_little(data):
    """Whatever they hold, and while they grow; a tenth at most, where a row is not next to nothing."""
    lengths = data.draw(st.lists(st.integers(80, 3000), min_size=1, max_size=6))
    writer = Writer(len(lengths), 8192)
    for row, length in enumerate(lengths):
        for start in range(0, length, 512):
            piece = min(512, length - start)
            writer.cache.begin(piece, CPU, [row])
            for layer in range(LAYERS):
                block = torch.zeros(1, HEADS, piece, SIZE)
                writer.cache.update(block, block, layer)
            writer.cache.keep([range(piece)])
    entry = 2 * LAYERS * HEADS * SIZE * 4
    for _ in range(data.draw(st.integers(1, 30))):
        writer.cache.begin(5, CPU)
        for layer in range(LAYERS):
            block = torch.zeros(len(lengths), HEADS, 5, SIZE)
            writer.cache.update(block, block, layer)
        memory = writer.cache.memory
        assert memory.used == sum(length + 5 for length in writer.cache.lengths) * entry
        assert memory.waste <= 0.1
        writer.cache.keep([[0, 3]] * len(lengths))
    storages = {storage.data_ptr(): storage.nbytes() for storage in _storages(writer.cache)}
    assert sum(storages.values()) == writer.cache.memory.held


def _storages(cache: TargetCache) -> list[torch.UntypedStorage]:
    """All that the cache holds a reference to, also through views."""
    own = [value for row in cache._storages for value in vars(row).values() if isinstance(value, list)]
    return [tensor.untyped_storage() for tensors in own for tensor in tensors if tensor is not None and tensor.numel()]


def test_no_more_is_made_in_advance_than_a_sequence_may_ever_need():
    writer = Writer(1, 103)
    for length in (100, 1, 2):
        ids, _ = writer.block(length)
        writer.keep(ids, [list(range(length))])
    assert writer.cache.memory == CacheMemory(103 * 2 * LAYERS * HEADS * SIZE * 4, 103 * 2 * LAYERS * HEADS * SIZE * 4)


def test_rows_are_one_padded_tensor_for_whoever_computes_with_them():
    parts = [torch.randn(1, HEADS, length, SIZE) for length in (3, 7, 1)]
    states, whole = RowStates(parts), torch.zeros(3, HEADS, 7, SIZE)
    for place, part in enumerate(parts):
        whole[place, :, : part.shape[2]] = part[0]
    assert states.shape == whole.shape
    assert states.dtype == whole.dtype
    assert torch.equal(states[1:], whole[1:])
    assert torch.equal(states.transpose(1, 2).reshape(3, 7, -1), whole.transpose(1, 2).reshape(3, 7, -1))
    assert torch.equal(whole @ states.mT, whole @ whole.mT)
    assert type(states + 1) is Tensor


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
