"""Where a committed token's keys and values lie, so that where they lie cannot be seen in a sum over them.

OpenVINO's float32 products sum over keys one after the other, in chunks: 512 keys each where there are up to 1,024 in
all, else 1,024 each (`tests/target_model/test_openvino_bits.py` asks the library itself). Hidden keys weigh zero and
change no sum, so a token's result depends on the order of the keys it sees and on the chunks they fall into, and on
nothing else. A block's own keys come last. So the last 128 slots of every chunk are left to blocks, and a tree may not
reach past the last position of its chunk: then an ancestor is in the same chunk, in the same order, whether it is
committed or still in the block.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

STEP = 128  # slots: the graph sees all slots there are, so no more are shown than soon needed
BLOCK = 128  # slots at the end of a chunk, and tokens of the widest block whose bits are those of single tokens
NOWHERE = 1 << 30  # the position of a slot that no token has: OpenVINO computes with integers of 32 bits
_SHORT, _LONG = 512, 1024
SECOND_CHUNK = _SHORT - BLOCK  # the first position that is not in the first chunk


def _chunk(position: int) -> tuple[int, int, int]:
    """Of a position's chunk: its first slot, its first position, and how many positions it has."""
    short, long = _SHORT - BLOCK, _LONG - BLOCK
    if position < 2 * short:
        number = position // short
        return number * _SHORT, number * short, short
    number = (position - 2 * short) // long
    return (1 + number) * _LONG, 2 * short + number * long, long


def slot(position: int) -> int:
    """The slot of the token at a position."""
    first, start, _ = _chunk(position)
    return first + position - start


def chunk_of(length: int) -> int:
    """The first slot of the chunk of the token that comes after `length` tokens: a block of its own has the same sums
    behind any number of slots of that chunk."""
    return _chunk(length)[0]


@cache
def slots_before(length: int) -> int:
    """How many slots a block sees that comes after `length` tokens: a whole number of steps, all in the chunk in which
    the block's first token will lie, once committed."""
    return -(-slot(length) // STEP) * STEP


def last_position(length: int) -> int:
    """The last position of the chunk of the token that comes after `length` tokens."""
    _, start, count = _chunk(length)
    return start + count - 1


@cache
def _known(slots: int) -> Tensor:
    where = torch.full((slots,), NOWHERE)
    position = 0
    while (first := slot(position)) < slots:
        _, start, count = _chunk(position)
        end = min(first + count, slots)
        where[first:end] = torch.arange(start, start + end - first)
        position = start + count
    return where


def positions_of(slots: int) -> Tensor:
    """Long `[slots]`: the position of the token that belongs into each slot, `NOWHERE` for those left to blocks."""
    return _known(slots)


def slots_of(start: int, end: int) -> Tensor | slice:
    """The slots of positions `start` to `end`: a slice where they lie side by side."""
    first, last = slot(start), slot(end - 1)
    if last - first == end - 1 - start:
        return slice(first, last + 1)
    return torch.tensor([slot(position) for position in range(start, end)])
