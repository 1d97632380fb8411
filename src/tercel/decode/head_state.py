"""The side of a head that drafts step by step: its cache and its last output, for every row (spec section 8).

The cache holds one entry for every committed token but the first: slot `t` is row `t` (feature `f_t`, token `x[t+1]`)
at head position `t`. Entries of committed tokens always come from the target's true features; those of drafted nodes
lie after them while a tree grows and are overwritten afterwards.

Shape legend: B rows, K top-k, H head's hidden size, W draft vocabulary, S slots, q/kv heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tercel.draft import StepHead
from tercel.draft.alignment import head_position, rope_position, token_in
from tercel.target_model.cache import TargetCache
from tercel.target_model.masks import additive, visible_slots
from tercel.target_model.protocol import TargetModel
from tercel.target_model.transfer import to_device


class HeadState:
    """The head's side of every row: its cache and its last output."""

    def __init__(self, head: StepHead, target: TargetModel, capacity: int) -> None:
        self.head, self.target = head, target
        self.positions = head.config.max_position_embeddings
        self.cache = TargetCache(0, capacity)
        self.output = torch.empty(0)  # [B, H]: of each row's newest entry, which predicts the root's children

    def embed(self, tokens: Tensor) -> Tensor:
        return self.head.embed_tokens(tokens) if self.head.config.own_embeddings else self.target.embed(tokens)

    def extend(
        self, features: Sequence[Sequence[Tensor]], entries: Sequence[Sequence[int]], rows: Sequence[int] | None = None
    ) -> Tensor:
        """Write entries of committed tokens into `rows` (all, if left out): a row's true features `[t, Ht]` a layer,
        and the `t` tokens after them. Returns the output `[B, H]` of each row's last.

        Only that last entry needs a query: the others are never drafted from.
        """
        cache, length = self.cache, max(map(len, entries))
        packed = to_device([[len(row), *row, *[0] * (length - len(row))] for row in entries], self.target.device)
        last, tokens = packed[:, 0] - 1, packed[:, 1:]
        padded = [F.pad(torch.cat(list(own), dim=-1), (0, 0, 0, length - len(own[0]))) for own in features]
        fused = self.head.fuse(torch.stack(padded))
        before = cache.starts(tokens.device, rows)
        written = before[:, None] + torch.arange(length, device=tokens.device)  # [B, T], slots: the entries' rows
        positions = self._known(head_position(token_in(written, 0)))
        now = self.head.project(self.embed(tokens), fused, positions)
        cache.begin(length, tokens.device, rows)
        keys, values = cache.update(now.key.transpose(1, 2), now.value.transpose(1, 2), 0)
        every = torch.arange(len(entries), device=tokens.device)
        cache.keep([range(len(row)) for row in entries])
        slots = torch.arange(keys.shape[2], device=tokens.device)
        seen = slots[None, None] < (before + last + 1)[:, None, None]  # [B, 1, S]
        attended = _attend(now.query[every, last][:, None], keys, values, seen)[:, 0]
        return self.head.finish(now.residual[every, last], attended)

    def draft_level(self, tokens: Tensor, hidden: Tensor, ancestors: Tensor, depth: int) -> Tensor:
        """Entries for drafted nodes `[B, K]` at `depth`, `hidden` `[B, K, H]` from their parents, `ancestors` bool
        `[B, K, depth*K]`: the drafted slots each sees, its own among them. Returns their outputs `[B, K, H]`."""
        width = tokens.shape[1]
        newest = self.cache.starts(tokens.device) - 1  # the row that drafts, whose step `depth` this is
        positions = self._known(rope_position(newest, depth))[:, None].expand(-1, width)
        now = self.head.project(self.embed(tokens), hidden, positions)
        self.cache.begin(width, tokens.device, uncommitted=(depth - 1) * width)
        keys, values = self.cache.update(now.key.transpose(1, 2), now.value.transpose(1, 2), 0)
        seen = visible_slots(self.cache.lengths, ancestors)
        return self.head.finish(now.residual, _attend(now.query, keys, values, seen))

    def log_q(self, output: Tensor) -> Tensor:
        """Outputs `[.., H]` to the draft's log-probabilities `[.., W]`."""
        return torch.log_softmax(self.head.logits(output).float(), -1)

    def _known(self, positions: Tensor) -> Tensor:
        """Entries past the head's last position keep that one: nothing is drafted from them."""
        return positions.clamp(max=self.positions - 1)


def _attend(query: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> Tensor:
    """query `[B, T, q, D]`, keys/values `[B, kv, S, D]`, seen bool `[B, T, S]` → `[B, T, q*D]`.

    The query heads of a key head are laid side by side as rows, so keys are never repeated.
    """
    rows, length, heads, size = query.shape
    kv = keys.shape[1]
    grouped = query.view(rows, length, kv, heads // kv, size).permute(0, 2, 3, 1, 4).reshape(rows, kv, -1, size)
    mask = additive(seen, query.dtype).repeat(1, 1, heads // kv, 1)
    out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
    return out.view(rows, kv, heads // kv, length, size).permute(0, 3, 1, 2, 4).reshape(rows, length, -1)
