"""Rows of OpenVINO's cache lie beside those that they run with, whatever comes and goes, and keep what they have."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

pytest.importorskip("openvino", reason="openvino is not installed: pip install 'tercel[openvino]'")

from tercel.target_model.openvino.cache import SlotCache
from tercel.target_model.openvino.graph import Layout
from tercel.target_model.openvino.places import chunk_of, slot, slots_before
from tercel.target_model.openvino.shelves import arranged

LAYOUT = Layout(((2, 4), (2, 4), (1, 8)))
GROUPS = list(LAYOUT.groups.items())


def run_block(cache: SlotCache, rows: list[int], width: int) -> dict[int, list[Tensor]]:
    """A block of random keys and values; by row, `[n, H, T, D]` a group."""
    written: dict[int, list[Tensor]] = {}
    runs = []
    for places in cache.runs(rows):
        block = [torch.randn(len(numbers), len(places), heads, width, size) for (heads, size), numbers in GROUPS]
        runs.append((places, block))
        written |= {rows[place]: [part[:, at] for part in block] for at, place in enumerate(places)}
    cache.hold(rows, runs)
    return written


def held(cache: SlotCache, row: int) -> list[Tensor]:
    """What the graph would see of a row's committed tokens, `[H, length, D]` a layer's keys or values."""
    slots = [slot(position) for position in range(cache.lengths[row])]
    return [part[0][:, slots] for part in cache.past([row])]


@pytest.mark.parametrize("run", [None, 0.0, 300.0, 1e9])
def test_rows_hold_what_they_were_given(run: float | None) -> None:
    chance = random.Random(5)
    torch.manual_seed(5)
    cache = SlotCache(LAYOUT, torch.float32, 0, run)
    truth: list[list[Tensor]] = []  # by row, as `held`
    longest = 0
    for _ in range(80):
        what = chance.random()
        if what < 0.25 or not truth:
            count = chance.randint(1, 3)
            cache.add_rows(count)
            truth += [[torch.empty(heads, 0, size) for heads, size in LAYOUT.shapes] for _ in range(count)]
        elif what < 0.4:
            stay = [row for row in range(len(truth)) if chance.random() < 0.7]
            chance.shuffle(stay)
            cache.select_rows(stay)
            truth = [truth[row] for row in stay]
        else:
            rows = sorted(chance.sample(range(len(truth)), chance.randint(1, len(truth))))
            width = chance.choice([1, 4, 100, 700])
            written = run_block(cache, rows, width)
            paths = [sorted(chance.sample(range(width), chance.randint(0, width))) for _ in rows]
            cache.keep(paths)
            for row, path in zip(rows, paths, strict=True):
                for group, (_, numbers) in zip(written[row], GROUPS, strict=True):
                    for own, number in zip(group, numbers, strict=True):
                        truth[row][number] = torch.cat([truth[row][number], own[:, path]], 1)
        for row, expected in enumerate(truth):
            for ours, theirs in zip(held(cache, row), expected, strict=True):
                assert torch.equal(ours, theirs)
        longest = max([longest, *cache.lengths])
        if run is not None:
            for places in cache.runs(range(len(truth))):
                assert len({chunk_of(cache.lengths[row]) for row in places}) == 1
    assert longest > 1024


def test_rows_run_together_where_that_costs_least() -> None:
    lengths = [10, 300, 20, 30, 310, 3000, 380]
    assert sorted(map(sorted, arranged(lengths, 1e9))) == [[0, 1, 2, 3, 4, 6], [5]]  # other chunks always apart
    assert sorted(map(sorted, arranged(lengths, 0.0))) == [[0, 2, 3], [1, 4, 6], [5]]
    assert sorted(map(sorted, arranged(lengths, 3 * 256 + 1))) == [[0, 1, 2, 3, 4, 6], [5]]
    assert sorted(map(sorted, arranged(lengths, 3 * 256 - 1))) == [[0, 2, 3], [1, 4, 6], [5]]


def test_ragged_rows_hold_little_more_than_each_alone() -> None:
    """And a row that leaves makes room for the next, of which no other row is copied."""
    cache = SlotCache(LAYOUT, torch.float32, 2, 1000.0)
    run_block(cache, [0, 1], 3000)
    cache.keep([range(3000), range(60)])
    alone = sum(slots_before(length) for length in (3000, 60)) * sum(h * d for h, d in LAYOUT.shapes) * 4
    assert cache.memory.held == alone
    cache.add_rows(30)
    before = {row: cache.past([row])[0].data_ptr() for row in range(2, 32)}
    cache.select_rows([row for row in range(32) if row != 7])
    moved = [row for row in range(2, 31) if cache.past([row])[0].data_ptr() != before[row + (row >= 7)]]
    assert len(moved) == 1
