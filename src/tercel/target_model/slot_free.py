"""Attention whose result for a token does not depend on which slots the keys it sees lie in.

Token by token, a text's keys lie side by side. In a draft tree siblings lie between them, so stock kernels add them up
in another order, and the last bits of the sum differ. But only the last few keys of a token can lie elsewhere: those
before its *border*, a function of its position alone, have been committed whenever it is computed, in slot after slot.
They are left to the stock kernel, under equal conditions: the same keys in the same slots, tiles of queries whose
size does not change how one of them is computed. The keys from the border on are added up in float64, where order
cannot be seen once the result is rounded. One softmax over both parts joins them (`docs/exactness.md` says how surely).

Shape legend: B rows, T block length, S slots, W of them in the second part, q query heads, kv key heads, D head size,
M = q / kv * T queries of a key head. T and S are without tokens that only fill up a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from tercel.target_model.masks import additive
from tercel.target_model.row_states import RowStates

STRIDE = 64  # borders are multiples of it
MARGIN = 16  # keys from the border to the token at least: how deep a tree may be before its nodes have to be sorted
TILE = 32  # queries of a call of the kernel: it would cut them up like that itself, and pack more of them otherwise
FEW = 4  # it takes other products for fewer queries, and, by threads, for numbers that are no multiple of it

# what `scaled_dot_product_attention` calls on a CPU; it also tells the logarithm of the sum of weights
_kernel = torch._scaled_dot_product_flash_attention_for_cpu


def border(position: int) -> int:
    """How many keys the first part has for a token at `position`."""
    return max(0, (position - MARGIN) // STRIDE * STRIDE)


@dataclass(frozen=True)
class First:
    """The first part for some tokens of a row.

    slots: in the order of positions; tokens: of the block, that it is for.
    """

    slots: slice | Tensor
    tokens: list[int]

    def of(self, storage: Tensor) -> Tensor:
        """Of keys or values `[1, kv, S, D]`."""
        return storage[:, :, self.slots]


@dataclass
class Split:
    """Which keys are in which part for every token of a block, for layers of one kind.

    mask: the additive one of the whole block, by which a layer's split is found. firsts: a row of the batch each,
    what its tokens' first parts are. starts, ends: slots between which each row's second part lies. seen: bool
    `[B, T, W]`, what a token sees there. windowed: bool `[B, T, S]` if the first part is not seen whole.
    """

    mask: Tensor
    firsts: list[list[First]]
    starts: list[int]
    ends: list[int]
    seen: Tensor
    windowed: Tensor | None
    _made: dict[tuple[object, ...], Tensor] = field(default_factory=dict)

    @property
    def columns(self) -> int:
        """Most first parts that a row has."""
        return max(map(len, self.firsts))

    def second(self, states: Sequence[Tensor]) -> Tensor:
        """Of each row's keys or values `[1, kv, S, D]` the second part, float64 `[B * kv, W, D]`."""
        if len(states) == 1:
            return states[0][0].narrow(1, self.starts[0], self.seen.shape[2]).double()
        _, kv, _, size = states[0].shape
        out = torch.zeros(len(states), kv, self.seen.shape[2], size, dtype=torch.float64)
        for row, (part, start, end) in enumerate(zip(states, self.starts, self.ends, strict=True)):
            out[row, :, : end - start] = part[0].narrow(1, start, end - start)
        return out.flatten(0, 1)

    def bias(self, kv: int, groups: int) -> Tensor:
        """What is added to scores of the second part, float64 `[B * kv, M, W]` or, of one row, `[1, M, W]`."""
        made = self._made.get((kv, groups))
        if made is None:
            rows, block, width = self.seen.shape
            heads = 1 if rows == 1 else kv
            wide = additive(self.seen, torch.float64)[:, :, None].expand(-1, heads, groups, -1, -1)
            made = self._made[kv, groups] = wide.reshape(rows * heads, groups * block, width)
        return made

    def others(self, column: int, groups: int) -> Tensor | None:
        """What is added to the scores of a first part so that it counts for its own tokens alone: `[B, 1, M]`."""
        block = self.seen.shape[1]
        alone = [column < len(parts) and len(parts[column].tokens) == block for parts in self.firsts]
        if all(alone):
            return None
        made = self._made.get(("others", column, groups))
        if made is None:
            away = torch.full((len(self.firsts), block), -torch.inf)
            for row, parts in enumerate(self.firsts):
                for first in parts[column : column + 1]:
                    away[row, first.tokens] = 0
            made = self._made["others", column, groups] = away[:, None, None].expand(-1, 1, groups, -1).flatten(2)
        return made

    def window(self, row: int, column: int, groups: int, size: int, dtype: torch.dtype) -> Tensor | None:
        """The kernel's mask for a first part, `[n, 1, TILE, slots]`, of `size` queries, filling ones too."""
        if self.windowed is None:
            return None
        made = self._made.get(("window", row, column, groups))
        if made is None:
            seen = self.windowed[row][:, self.firsts[row][column].slots].repeat(groups, 1)
            seen = F.pad(seen, (0, 0, 0, size - len(seen)), value=True)
            made = additive(seen.unflatten(0, (-1, min(size, TILE))), dtype)
            self._made["window", row, column, groups] = made
        return made


_SPLITS: ContextVar[Sequence[Split]] = ContextVar("the splits of the block that runs", default=())


@contextmanager
def splitting(splits: Sequence[Split]) -> Iterator[None]:
    """Within, layers that get the mask of one of `splits` attend as it says."""
    before = _SPLITS.set(splits)
    try:
        yield
    finally:
        _SPLITS.reset(before)


def split_of(mask: Tensor) -> Split | None:
    return next((split for split in _SPLITS.get() if split.mask is mask), None)


class Borders:
    """Where a block's first parts end; the same for layers of all kinds.

    lengths: committed tokens of each row; positions `[B, T]`; block_mask bool `[B, T, T]`; without tokens that only
    fill up the block.
    """

    def __init__(self, lengths: Sequence[int], positions: Tensor, block_mask: Tensor) -> None:
        self.lengths, self.block = lengths, positions.shape[1]
        self.firsts = [
            list(_firsts(lengths[row], places, block_mask[row])) for row, places in enumerate(positions.tolist())
        ]
        self.starts = [
            min(length, border(min(places))) for length, places in zip(lengths, positions.tolist(), strict=True)
        ]
        self.ends = [length + self.block for length in lengths]

    def split(self, seen: Tensor, mask: Tensor, windowed: bool) -> Split:
        """seen: bool `[B, T, S]` at least, what is seen in layers of a kind; mask: what these layers get; windowed:
        whether less is seen than all that is committed."""
        seen = seen[:, : self.block]
        width = max(end - start for start, end in zip(self.starts, self.ends, strict=True))
        second = torch.zeros(len(seen), self.block, width, dtype=torch.bool)
        for row, (start, end) in enumerate(zip(self.starts, self.ends, strict=True)):
            part = second[row, :, : end - start]
            part.copy_(seen[row, :, start:end])
            for first in self.firsts[row]:
                inside = torch.zeros(seen.shape[2], dtype=torch.bool)
                inside[first.slots] = True
                part[first.tokens] &= ~inside[start:end]
        return Split(mask, self.firsts, self.starts, self.ends, second, seen if windowed else None)


def _firsts(length: int, positions: Sequence[int], block_mask: Tensor) -> Iterator[First]:
    """The different first parts of a row. Past what is committed, a token's own ancestors come in, in their order."""
    found: dict[tuple[int, ...], list[int]] = {}
    for token, position in enumerate(positions):
        end = border(position)
        own = tuple(block_mask[token].nonzero()[:, 0].tolist()[: end - length]) if end > length else ()
        found.setdefault((end, *own), []).append(token)
    for (end, *nodes), tokens in found.items():
        if end and nodes == list(range(len(nodes))):
            yield First(slice(end), tokens)
        elif end:
            yield First(torch.tensor([*range(length), *(length + node for node in nodes)]), tokens)


def slot_free_attention(query: Tensor, key: Tensor, value: Tensor, split: Split, scale: float) -> Tensor:
    """query `[B, q, T, D]`, key and value `[B, kv, S, D]` → `[B, T, q, D]`; 0 for what only fills up the block."""
    rows, heads, _, size = query.shape
    block = split.seen.shape[1]
    filling = query.shape[2] - block
    if filling:
        query = query.narrow(2, 0, block)
    kv = key.shape[1]
    groups = heads // kv
    queries = query.reshape(rows, kv, groups * block, size)
    wide = queries.double().reshape(rows * kv, groups * block, size)
    keys, values = _rows(key), _rows(value)
    scores = torch.baddbmm(split.bias(kv, groups), wide, split.second(keys).mT, alpha=scale)
    wide = split.second(values)
    firsts = [_first(queries, keys, values, split, column, scale) for column in range(split.columns)]
    if not firsts:
        out = torch.softmax(scores, -1) @ wide
    else:
        weights = torch.softmax(torch.cat([*(total for _, total in firsts), scores], -1), -1)
        out = weights.narrow(2, 0, 1) * firsts[0][0]
        for column, (part, _) in enumerate(firsts[1:], 1):
            out += weights.narrow(2, column, 1) * part
        out = torch.baddbmm(out, weights.narrow(2, len(firsts), wide.shape[1]), wide)
    by_token = out.view(rows, heads, block, size).transpose(1, 2)
    by_token = by_token.to(query.dtype, memory_format=torch.contiguous_format)
    return F.pad(by_token, (0, 0, 0, 0, 0, filling)) if filling else by_token


def _rows(states: Tensor) -> Sequence[Tensor]:
    return states.rows if isinstance(states, RowStates) else states.split(1)


def _first(
    queries: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], split: Split, column: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention over a first part of every row, `[B * kv, M, D]`, and the logarithm of its weights' sum, float32
    `[B * kv, M, 1]`."""
    rows, kv, count, size = queries.shape
    groups = count // split.seen.shape[1]
    parts = []
    for row, firsts in enumerate(split.firsts):
        if column < len(firsts):
            mask = split.window(row, column, groups, filled(count), queries.dtype)
            key, value = firsts[column].of(keys[row]), firsts[column].of(values[row])
            parts.append(_stock(queries if rows == 1 else queries.narrow(0, row, 1), key, value, mask, scale))
        else:
            parts.append((queries.new_zeros(kv, count, size), torch.full((kv, count), -torch.inf)))
    out, total = parts[0] if rows == 1 else (torch.cat(some) for some in zip(*parts, strict=True))
    others = split.others(column, groups)
    if others is not None:
        total = (total.view(rows, kv, count) + others).flatten(0, 1)
    return out, total.unsqueeze(-1)


def filled(count: int) -> int:
    """How many queries there are with those that fill up tiles: all are of `TILE`, but a single one of any multiple of
    `FEW`."""
    unit = FEW if count <= TILE else TILE
    return -(-count // unit) * unit


def _stock(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """The kernel over query `[1, kv, M, D]`, key and value `[1, kv, slots, D]` of a row: `[kv, M, D]` and `[kv, M]`."""
    _, kv, count, _ = query.shape
    size = filled(count)
    if size != count:
        query = F.pad(query, (0, 0, 0, size - count))
    if size > TILE:
        query = query[0].unflatten(1, (-1, TILE)).transpose(0, 1)
    if kv == len(query) == 1:  # of a single tile the threads would share the products, each some queries
        query = query.expand(2, -1, -1, -1)
    if len(query) > 1:
        key, value = (part.expand(len(query), -1, -1, -1) for part in (key, value))
    out, total = _kernel(query, key, value, 0.0, False, attn_mask=mask, scale=scale)
    if size > TILE:
        out, total = (part.transpose(0, 1).flatten(1, 2) for part in (out, total))
    else:
        out, total = out[0], total[0]
    return out.narrow(1, 0, count), total.narrow(1, 0, count)
