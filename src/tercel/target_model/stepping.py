"""The cache of models that can only be decoded token by token.

A recurrent state cannot go back to an earlier token, and some attentions make their masks or position biases
themselves, from the place of a key in the cache. Such a model gets what `generate()` gives it: `transformers`' own
cache, one for each row, and whole blocks alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import DynamicCache, PretrainedConfig

from tercel.errors import TercelError


class StepCache:
    """`transformers`' own cache of each row. The rows of a block run one after another."""

    def __init__(self, rows: int, config: PretrainedConfig) -> None:
        self.rows = [DynamicCache(config=config) for _ in range(rows)]
        self.lengths: list[int] = [0] * rows
        self._block = 0

    def begin(self, block: int) -> None:
        """Announce a block of `block` tokens a row."""
        self._block = block

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """Make the last block permanent; raises `TercelError` for anything but the whole of it."""
        for row, path in enumerate(paths):
            if list(path) != list(range(self._block)):
                raise TercelError(f"this model keeps a state that cannot forget a part of {self._block} tokens")
            self.lengths[row] += self._block

    def add_row(self, other: StepCache) -> None:
        """Append the only row of `other` (a prefilled request) as the last row."""
        self.rows += other.rows
        self.lengths += other.lengths

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep only `rows`, in that order (finished requests leave the batch)."""
        self.rows = [self.rows[row] for row in rows]
        self.lengths = [self.lengths[row] for row in rows]
