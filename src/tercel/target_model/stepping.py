"""Models that can only be decoded token by token.

A recurrent state cannot go back to an earlier token, and some attentions make their masks or position biases
themselves, from the place of a key in the cache. Such a model gets what `generate()` gives it: `transformers`' own
cache, one for each row, and whole blocks alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from torch import Tensor
from transformers import DynamicCache, PretrainedConfig

from tercel.errors import TercelError
from tercel.target_model.backend_names import TORCH
from tercel.target_model.kept import KeptTokens
from tercel.target_model.memory import CacheMemory
from tercel.target_model.output import TargetOutput, joined
from tercel.target_model.protocol import RowCache
from tercel.target_model.stock import StockDecoder
from tercel.target_model.transfer import to_device


class StepCache:
    """`transformers`' own cache of each row. The rows of a block run one after another."""

    def __init__(self, rows: int, config: PretrainedConfig) -> None:
        self._config = config
        self.caches: list[DynamicCache] = []
        self.lengths: list[int] = []
        self._rows: Sequence[int] = ()  # of the last block
        self._block = 0
        self.add_rows(rows)

    @property
    def memory(self) -> CacheMemory:
        states = [state for cache in self.caches for layer in cache.layers for state in vars(layer).values()]
        held = sum(state.nbytes for state in states if isinstance(state, Tensor))
        return CacheMemory(held, held)

    def begin(self, block: int, rows: Sequence[int]) -> None:
        """Announce a block of `block` tokens for each of `rows`."""
        self._block, self._rows = block, rows

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """Make the last block permanent; raises `TercelError` for anything but the whole of it."""
        for row, path in zip(self._rows, paths, strict=True):
            if list(path) != list(range(self._block)):
                raise TercelError(f"this model keeps a state that cannot forget a part of {self._block} tokens")
            self.lengths[row] += self._block

    def add_rows(self, count: int, capacity: int = 0) -> None:
        self.caches += [DynamicCache(config=self._config) for _ in range(count)]
        self.lengths += [0] * count

    def select_rows(self, rows: Sequence[int]) -> None:
        self.caches = [self.caches[row] for row in rows]
        self.lengths = [self.lengths[row] for row in rows]

    def taken(self, row: int, start: int, end: int) -> KeptTokens:
        raise TercelError("this model keeps a state that cannot be cut between two tokens")

    def restore(self, kept: Mapping[int, Sequence[KeptTokens]]) -> None:
        raise TercelError("this model keeps a state that cannot be cut between two tokens")


class TokenSteps:
    """Blocks are causal and their positions follow the cache, whatever they are said to be."""

    backend = TORCH
    torch_threads = None
    block_widths = ()
    renews = False  # a state cannot be filled anew in place
    resumes = False

    def __init__(self, stock: StockDecoder) -> None:
        self._stock = stock

    def expect_many(self, many: bool = True) -> bool:
        """There is nothing to prepare."""
        return False

    def new_cache(self, rows: int, capacity: int) -> StepCache:
        return StepCache(rows, self._stock.config)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: RowCache,
        block_mask: Tensor | None,
        capture: Sequence[int],
        rows: Sequence[int] | None,
    ) -> TargetOutput:
        own = cast(StepCache, cache)
        rows = range(len(own.caches)) if rows is None else rows
        own.begin(tokens.shape[1], rows)
        outputs = [self._stock.run(tokens[i : i + 1], capture, cache=own.caches[row]) for i, row in enumerate(rows)]
        return joined(outputs, 0)

    def prefill_chunk(
        self,
        remaining: Sequence[Sequence[int]],
        cache: RowCache,
        rows: Sequence[int],
        limit: int,
        capture: Sequence[int] = (),
    ) -> list[TargetOutput]:
        """The first prompt, whole, as `generate()` does, however long; some models go on from one token only."""
        tokens = list(remaining[0][:1] if cache.lengths[rows[0]] else remaining[0])
        there = to_device([tokens], self._stock.model.device)
        out = self.forward(there, there, cache, None, capture, rows[:1])
        cache.keep([range(len(tokens))])
        return [out]

    def last_position(self, length: int) -> None:
        return None

    def renew(self, cache: RowCache, texts: Sequence[Sequence[int]]) -> None:
        pass
