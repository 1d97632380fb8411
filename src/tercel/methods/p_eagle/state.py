"""The side of a P-EAGLE head: what is committed is written together with the rows that stand ahead of it, in one
forward, and all levels of a tree are drafted from what that gave.

The rows ahead lie behind the committed entries and are overwritten by the next ones. A level of a tree is a step of the
tie: of every position the `CANDIDATES` tokens that its row finds likeliest are kept, and only their scores are moved;
what the others have in common is their mass.

Shape legend: B rows, T new entries, P nodes of a level, K positions, H head's hidden size, r width of the tie, M
candidates, W draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tercel.decode.graph_head_state import GraphHeadState
from tercel.decode.head_state import AttendedState, TorchHeadState, likeliest
from tercel.draft.alignment import rope_position
from tercel.methods.p_eagle.module import PEagleHead

CANDIDATES = 128  # of a position


class Ahead(NamedTuple):
    """What the rows of all positions say: log_q `[B, K, M]`, the likeliest first, and their places in the draft
    vocabulary `[B, K, M]`; rows `[B, K, r]`, their shares of the tie (empty for a head without)."""

    log_q: Tensor
    places: Tensor
    rows: Tensor


class AheadState(AttendedState):
    """output: of each row's newest entry and the rows ahead of it, side by side, `[B, K * H]`; below the root, the ties
    of the nodes' paths, `[.., r]`. positions_ahead: how many positions are drafted, of those that the head has."""

    head: PEagleHead
    positions_ahead: int
    _ahead: Ahead | None = None

    def extend(
        self, features: Sequence[Sequence[Tensor]], entries: Sequence[Sequence[int]], rows: Sequence[int] | None = None
    ) -> Tensor:
        """As it says there; returns `[B, K * H]`."""
        padded, tokens, last = self._packed(features, entries)
        (count, width), ahead, device = tokens.shape, self.positions_ahead - 1, tokens.device
        block, steps = torch.arange(width, device=device), torch.arange(1, ahead + 1, device=device)
        embedding, hidden = self.embed(tokens), self._fuse(padded)
        newest = self._positions(rows)[:, None] + last  # rows, `[B, 1]`
        further_on = [self._known(rope_position(newest, step)) for step in range(1, ahead + 1)]
        positions = torch.cat([self._written_at(rows, block), *further_on], 1)
        own = last[..., None].expand(-1, 1, hidden.shape[-1])
        further = self.head.unknown(embedding.gather(1, own), hidden.gather(1, own), slice(1, ahead + 1))
        embedding, hidden = (torch.cat(pair, 1) for pair in zip((embedding, hidden), further, strict=True))
        asked = torch.cat([last, width + steps[None].expand(count, -1) - 1], 1)
        before = (block <= last)[:, None].expand(-1, ahead + 1, -1)
        each = torch.ones(ahead + 1, ahead, dtype=torch.bool, device=device).tril(-1).expand(count, -1, -1)
        output = self._write(embedding, hidden, positions, torch.cat([before, each], -1), asked, rows)
        self._keep(entries, rows)
        return output.flatten(1)

    def draft_level(self, tokens: Tensor, hidden: Tensor, ancestors: Tensor, depth: int) -> Tensor:
        """The ties `[B, P, r]` of drafted nodes, `hidden` those of their parents; nothing is written."""
        head, ahead = self.head, self._ahead or self._look_ahead(self.output)
        if not head.config.tie_size:
            return hidden.new_empty(*tokens.shape, 0)
        token = head.tie_token(head.midlayer.input_layernorm(self.embed(tokens)))
        return head.tied(ahead.rows[:, depth, None], token, hidden if depth > 1 else None)

    def best(self, output: Tensor, count: int, depth: int) -> tuple[Tensor, Tensor]:
        """As it says there."""
        nodes = output.shape[:-1]  # at the root `[B]` or `[B, 1]`
        if depth == 1:
            ahead = self._look_ahead(output)
            return ahead.log_q[:, 0, :count].reshape(*nodes, -1), ahead.places[:, 0, :count].reshape(*nodes, -1)
        assert self._ahead is not None
        log_q, places = self._ahead.log_q[:, depth - 1], self._ahead.places[:, depth - 1]  # [B, M]
        if not self.head.config.tie_size:
            return log_q[:, None, :count].expand(*nodes, -1), places[:, None, :count].expand(*nodes, -1)
        moved = log_q[:, None] + (output @ self.head.lm_tie.weight[places].mT).float()  # [B, P, M]
        others = (1.0 - log_q.exp().sum(-1, keepdim=True)).clamp(min=0.0)  # of every row, [B, 1]
        whole = torch.logaddexp(moved.logsumexp(-1, keepdim=True), others.log()[:, None])
        found, which = (moved - whole).topk(min(count, moved.shape[-1]))
        return found, places[:, None].expand(*nodes, -1).gather(-1, which)

    def _look_ahead(self, output: Tensor) -> Ahead:
        """What the rows say, from `[.., K * H]`."""
        head = self.head
        rows = output.reshape(-1, self.positions_ahead, head.config.hidden_size)
        log_q, places = likeliest(self._logits(rows), CANDIDATES)
        shares = head.tie_row(head.norm(rows)) if head.config.tie_size else rows[..., :0]
        self._ahead = Ahead(log_q, places, shares)
        return self._ahead


class TorchAheadState(AheadState, TorchHeadState):
    """Computed by the head's own modules."""


class GraphAheadState(AheadState, GraphHeadState):
    """Its layer computed by OpenVINO graphs, beside a target that they compute too."""
