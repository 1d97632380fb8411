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
from tercel.target_model.prefill import prefill, run_pieces
from tercel.target_model.protocol import RowCache
from tercel.target_model.stock import StockDecoder
from tercel.target_model.structure import attention_windows


class MaskedBlocks:
    """Trees, chains and padded prompts of many rows in one forward, with a `TargetCache`."""

    backend = TORCH
    torch_threads = None

    def __init__(self, stock: StockDecoder) -> None:
        self._stock = stock
        self._windows = attention_windows(stock.config)
        self.renews = stock.rope is None or bool(stock.rope.modules)

    def new_cache(self, rows: int, capacity: int) -> TargetCache:
        return TargetCache(rows, capacity)

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
        lengths = [own.lengths[row] for row in rows]
        if block_mask is None:
            block_mask = causal_block(tokens.shape[1], tokens.device).expand(len(rows), -1, -1)
        own.begin(tokens.shape[1], tokens.device, rows)
        masks = self._masks(visible_slots(lengths, block_mask), positions, lengths)
        with nullcontext() if self._stock.rope is None else self._stock.rope.block(own, rows, positions):
            return self._stock.run(tokens, capture, positions, masks, own)

    def _masks(self, seen: Tensor, positions: Tensor, lengths: Sequence[int]) -> Tensor | dict[str, Tensor]:
        masks: dict[str, Tensor] = {}
        for kind, window in self._windows.items():
            allowed = seen
            if window is not None and max(lengths) + seen.shape[1] > window:
                allowed = seen & within_window(positions, slot_positions(lengths, positions), window)
            masks[kind] = additive(allowed, self._stock.model.dtype)
        return masks if len(masks) > 1 else next(iter(masks.values()))

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
