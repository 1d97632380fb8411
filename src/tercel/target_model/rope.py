"""RoPE whose frequencies depend on how long the sequence is: `longrope` and dynamic NTK.

Stock modelling takes the longest position of a *call* for the length. So a prompt run in pieces, a short row beside a
long one and a block of drafts would be rotated by another rule than one forward over the whole sequence, and keys in
the cache by another than those after them. Here a length belongs to a row: all its keys are turned as for one sequence,
and a sequence that grows past the border is run again from its first token (`Target.renew`), which is what stock
`generate()` does for Phi-3.

Shape legend: B rows, T block length, D rotated size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from tercel.errors import TercelError
from tercel.target_model.cache import TargetCache
from tercel.target_model.structure import rope_kinds
from tercel.target_model.transfer import to_device


class LengthRope:
    """The rotary modules of one model, told how long each row's sequence is.

    border: sequences of up to so many tokens are turned by the short factors, longer ones by the long factors.
    """

    def __init__(self, border: int, modules: Sequence[nn.Module]) -> None:
        self.border = border
        self.modules = tuple(modules)
        self._lengths: list[int] | None = None  # of each row of the call; None: stock behaviour
        for module in self.modules:
            self._wrap(module)

    @classmethod
    def of(cls, decoder: nn.Module, config: PretrainedConfig) -> LengthRope | None:
        """None for models whose frequencies do not depend on the length."""
        borders = [kind["original_max_position_embeddings"] for kind in _kinds(config, "longrope")]
        if not borders:
            return None
        modules = [module for module in decoder.modules() if type(module).__name__.endswith("RotaryEmbedding")]
        return cls(min(borders), modules)

    def is_long(self, length: int) -> bool:
        return length > self.border

    @contextmanager
    def sequences(self, lengths: Sequence[int]) -> Iterator[None]:
        """Within, row `b` of every forward belongs to a sequence of `lengths[b]` tokens; a single one is for all."""
        before, self._lengths = self._lengths, list(lengths)
        try:
            yield
        finally:
            self._lengths = before

    @contextmanager
    def block(self, cache: TargetCache, rows: Sequence[int], positions: Tensor) -> Iterator[None]:
        """Within, a block at `positions` `[B, T]` after these rows of `cache` is rotated as the keys of its row are.

        Raises `TercelError` if the block crosses the border: then no keys would be right for all of it.
        """
        lengths = [max(cache.lengths[row] + 1, cache.turned_for[row]) for row in rows]
        stale = self.stale_rows(cache, rows)
        for place, row in enumerate(rows):
            near = not self.is_long(lengths[place]) and self.is_long(cache.lengths[row] + positions.shape[1])
            if (near and self.is_long(int(positions[place].max()) + 1)) or row in stale:
                raise TercelError(
                    f"a block crosses position {self.border}, past which all tokens before it are rotated again; "
                    "end it there and renew the cache"
                )
        with self.sequences(lengths):
            yield

    def stale_rows(self, cache: TargetCache, rows: Sequence[int]) -> list[int]:
        """Those of `rows` whose next token lies past the border, while their keys are those of a short sequence."""
        known = ((row, cache.lengths[row], cache.turned_for[row]) for row in rows)
        return [row for row, n, turned in known if n and self.is_long(n + 1) and not self.is_long(turned)]

    def _wrap(self, module: nn.Module) -> None:
        stock = module.forward

        def forward(x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            if self._lengths is None:
                return stock(x, position_ids, *args, **kwargs)
            rows = max(len(self._lengths), len(position_ids))
            positions = position_ids.expand(rows, -1)
            cos, sin = x.new_empty(0), x.new_empty(0)
            for long in (False, True):
                chosen = [b for b in range(rows) if self.is_long(self._lengths[b % len(self._lengths)]) == long]
                if not chosen:
                    continue
                place = None if len(chosen) == rows else to_device(chosen, positions.device)
                # one position more, of the sequence's own side, decides for all of the call
                last = positions.new_full((len(chosen), 1), self.border if long else 0)
                own = positions if place is None else positions.index_select(0, place)
                turned = stock(x, torch.cat([own, last], 1), *args, **kwargs)
                part_cos, part_sin = (part[:, :-1] for part in turned)
                if place is None:
                    return part_cos, part_sin
                if not cos.numel():
                    cos, sin = (part.new_empty(rows, *part.shape[1:]) for part in (part_cos, part_sin))
                cos[place], sin[place] = part_cos, part_sin
            return cos, sin

        module.forward = forward  # type: ignore[method-assign]


def depends_on_length(parameters: Mapping[str, Any]) -> bool:
    """Whether RoPE parameters give other frequencies to longer sequences."""
    return any(kind in parameters.get("rope_type", "") for kind in ("longrope", "dynamic"))


def dynamic_ntk(config: PretrainedConfig) -> bool:
    """Whether every token past `max_position_embeddings` would turn all keys before it anew."""
    return bool(_kinds(config, "dynamic"))


def _kinds(config: PretrainedConfig, rope_type: str) -> list[dict[str, Any]]:
    """The RoPE parameters of that type."""
    return [kind for kind in rope_kinds(config) if rope_type in kind.get("rope_type", "")]
