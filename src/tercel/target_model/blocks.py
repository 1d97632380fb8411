"""Blocks under a mask after a ragged cache: how a model runs that takes both from outside.

Shape legend: B rows, T block length, S slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import cast

from torch import Tensor

from tercel.target_model.backend_names import TORCH
from tercel.target_model.cache import TargetCache
from tercel.target_model.masks import additive, causal_block, slot_positions, visible_slots, within_window
from tercel.target_model.output import TargetOutput
from tercel.target_model.padding import WIDEST, missing, padded_block
from tercel.target_model.prefill import prefill, run_pieces
from tercel.target_model.protocol import RowCache
from tercel.target_model.slot_free import Borders, Split, splitting
from tercel.target_model.stock import StockDecoder
from tercel.target_model.structure import attention_windows


class MaskedBlocks:
    """Trees, chains and padded prompts of many rows in one forward, with a `TargetCache`.

    same_bits: whether a CPU computes a token of a block as token-by-token decoding does, to the bit
    (`docs/exactness.md`). Blocks without a mask of their own, such as prompts, take the fast way: no draft changes how
    they are run.
    """

    backend = TORCH
    torch_threads = None
    block_widths = ()

    def __init__(self, stock: StockDecoder, same_bits: bool = False) -> None:
        self._stock = stock
        self.same_bits = same_bits
        self._windows = attention_windows(stock.config)
        self.renews = stock.rope is None or bool(stock.rope.modules)
        self.resumes = stock.rope is None or not stock.rope.modules  # where keys do not depend on what comes after

    def expect_many(self, many: bool = True) -> bool:
        """There is nothing to prepare."""
        return False

    def new_cache(self, rows: int, capacity: int) -> TargetCache:
        return TargetCache(rows, capacity + WIDEST)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: RowCache,
        block_mask: Tensor | None,
        capture: Sequence[int],
        rows: Sequence[int] | None,
    ) -> TargetOutput:
        own = cast(TargetCache, cache)
        rows = range(own.rows) if rows is None else rows
        width = tokens.shape[1]
        if block_mask is None:
            causal = causal_block(width, tokens.device).expand(len(rows), -1, -1)
            return self._run(tokens, positions, own, causal, capture, rows)
        if not self.same_bits or tokens.device.type != "cpu":
            return self._run(tokens, positions, own, block_mask, capture, rows)
        borders = Borders([own.lengths[row] for row in rows], positions, block_mask)
        extra = missing(len(rows), width, self._stock.model.dtype)
        if extra:
            tokens, positions, block_mask = padded_block(tokens, positions, block_mask, extra)
        return self._run(tokens, positions, own, block_mask, capture, rows, borders).first(width)

    def _run(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: TargetCache,
        block_mask: Tensor,
        capture: Sequence[int],
        rows: Sequence[int],
        borders: Borders | None = None,
    ) -> TargetOutput:
        lengths = [cache.lengths[row] for row in rows]
        cache.begin(tokens.shape[1], tokens.device, rows)
        masks, splits = self._masks(visible_slots(lengths, block_mask), positions, lengths, borders)
        rotated = nullcontext() if self._stock.rope is None else self._stock.rope.block(cache, rows, positions)
        with rotated, splitting(splits):
            return self._stock.run(tokens, capture, positions, masks, cache)

    def _masks(
        self, seen: Tensor, positions: Tensor, lengths: Sequence[int], borders: Borders | None
    ) -> tuple[Tensor | dict[str, Tensor], list[Split]]:
        """For each kind of layers, and how attention that does not know slots splits it."""
        masks: dict[str, Tensor] = {}
        splits: list[Split] = []
        for kind, window in self._windows.items():
            allowed, windowed = seen, window is not None and max(lengths) + seen.shape[1] > window
            if window is not None and windowed:
                allowed = seen & within_window(positions, slot_positions(lengths, positions), window)
            masks[kind] = additive(allowed, self._stock.model.dtype)
            if borders is not None:
                splits.append(borders.split(allowed, masks[kind], windowed))
        return masks if len(masks) > 1 else next(iter(masks.values())), splits

    def prefill_chunk(
        self,
        remaining: Sequence[Sequence[int]],
        cache: RowCache,
        rows: Sequence[int],
        limit: int,
        capture: Sequence[int] = (),
    ) -> list[TargetOutput]:
        own = cast(TargetCache, cache)
        for row, tokens in zip(rows, remaining, strict=True):
            if not own.lengths[row]:
                own.turned_for[row] = max(own.turned_for[row], len(tokens))
        return run_pieces(self, remaining, own, rows, limit, capture, self._stock.model.device)

    def last_position(self, length: int) -> None:
        return None

    def renew(self, cache: RowCache, texts: Sequence[Sequence[int]]) -> None:
        own, rope = cast(TargetCache, cache), self._stock.rope
        for row in () if rope is None else rope.stale_rows(own, range(len(texts))):
            length = own.lengths[row]
            own.restart(row, turned_for=length + 1)
            prefill(self, [texts[row][:length]], own, [row])
