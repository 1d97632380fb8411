"""The side of an MTP head: entries of every module for every committed token, and of drafted ones while a tree grows.

Every module has an entry for the token at position `p`: it reads the token and what the module before it gave for the
token at `p - 1`; the first module reads the target's hidden state there. So module `k` (from 1) has none for tokens
before `k`; their slots are there and hidden. Of a drafted token at depth `d` the modules after the first `d` have
entries, for what they read is known: all of the token above it. When they are used up, the last one reads its own
output.

Shape legend: B rows, T new entries, K nodes of a level, M modules, H hidden size, S slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tercel.decode.head_state import HeadState, HeadWindow
from tercel.methods.mtp.module import MtpHead
from tercel.target_model.cache import TargetCache
from tercel.target_model.masks import additive, causal_block, visible_slots
from tercel.target_model.protocol import TargetModel


class MtpCache(TargetCache):
    """newest: of each row, what every module gave for its last committed token, `[M, H]`; None before the first."""

    def __init__(self) -> None:
        self.newest: list[Tensor | None] = []
        super().__init__(0, 0)

    def add_rows(self, count: int, capacity: int = 0) -> None:
        super().add_rows(count, capacity)
        self.newest += [None] * count

    def select_rows(self, rows: Sequence[int]) -> None:
        super().select_rows(rows)
        self.newest = [self.newest[row] for row in rows]


class MtpState(HeadState):
    """output: what the modules gave that have an entry, side by side, the one that drafts first: `[.., m * H]`."""

    head: MtpHead

    def __init__(self, head: MtpHead, target: TargetModel, window: HeadWindow | None = None) -> None:
        super().__init__(head, target, window)
        self.cache: MtpCache = MtpCache()
        self.size = head.config.hidden_size
        self.resumes = len(head.layers) == 1  # the others read what the one before gave for the token before

    def extend(
        self, features: Sequence[Sequence[Tensor]], entries: Sequence[Sequence[int]], rows: Sequence[int] | None = None
    ) -> Tensor:
        """As it says there; returns `[B, M * H]`."""
        cache, places = self.cache, range(len(self.cache.lengths)) if rows is None else rows
        hidden, tokens, last = self._packed(features, entries)
        count, width = tokens.shape
        positions = self._written_at(rows, torch.arange(width, device=tokens.device))
        embedding = self.embed(tokens)
        cache.begin(width, tokens.device, places)
        seen = visible_slots(
            [cache.lengths[place] for place in places], causal_block(width, tokens.device).expand(count, -1, -1)
        )
        none = hidden.new_zeros(len(self.head.layers), self.size)
        before = torch.stack([none if (own := cache.newest[place]) is None else own for place in places])  # [B, M, H]
        ends = last[..., None].expand(-1, 1, self.size)
        newest = []
        for number in range(len(self.head.layers)):
            output = self.head.step(number, embedding, hidden, positions, self._mask(seen, number), cache)
            newest.append(output.gather(1, ends))
            hidden = torch.cat([before[:, number, None], output[:, :-1]], 1)
        together = torch.cat(newest, 1)
        for place, own in zip(places, together.unbind(), strict=True):
            cache.newest[place] = own
        self._keep(entries, rows)
        return together.flatten(1)

    def draft_level(self, tokens: Tensor, hidden: Tensor, ancestors: Tensor, depth: int) -> Tensor:
        """As it says there; `hidden` are outputs of the parents."""
        cache, (_, width), modules = self.cache, tokens.shape, len(self.head.layers)
        positions = self._drafted_at(depth)[:, None].expand(-1, width)
        embedding = self.embed(tokens)
        cache.begin(width, tokens.device, uncommitted=ancestors.shape[-1] - width)
        seen = visible_slots(cache.lengths, ancestors)
        outputs = []
        for number, read in zip(range(min(depth, modules - 1), modules), hidden.split(self.size, -1), strict=False):
            outputs.append(self.head.step(number, embedding, read, positions, self._mask(seen, number), cache))
        return torch.cat(outputs, -1)

    def _mask(self, seen: Tensor, number: int) -> Tensor:
        """What module `number` adds to its scores, where `seen` `[B, T, S]` is there."""
        if number:
            seen = seen.clone()
            seen[..., :number] = False
        return additive(seen, self.head.dtype)

    def _positions(self, rows: Sequence[int] | None) -> Tensor:
        return self.cache.positions(self.target.device, rows)

    def _logits(self, output: Tensor) -> Tensor:
        return self.head.logits(output[..., : self.size]).float()
