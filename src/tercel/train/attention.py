"""Attention of training-time test: one causal block and one extra key a later step, in memory linear in
length.

At step `s`, row `t` attends to the step-0 keys `0..t` of its sequence and to exactly one key of each later
step `1..s`: its own row's (spec section 4). Both parts lie side by side under one softmax. The forward keeps its
inputs alone; the backward makes the weights again chunk by chunk, so nothing of size `T x T` outlives a chunk.

Shape legend: N packed tokens, R rows at this step, s later steps so far, q/kv heads, G = q/kv, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CHUNK_ROWS = 128
ALIGNED = 32  # scores a row are filled up to a multiple: products are quicker on rows that begin at round addresses


@dataclass(frozen=True)
class Segment:
    """Rows `row_start..row_end` belong to one sequence, whose tokens start at `token_start`; they see tokens
    up to `token_end` (exclusive), and all of them those up to `common_end`."""

    row_start: int
    row_end: int
    token_start: int
    token_end: int
    common_end: int


def segments(rows: Tensor, lengths: list[int]) -> list[Segment]:
    """Cut the rows (`[R]`, ascending packed indices) at sequence borders and into chunks of `CHUNK_ROWS`."""
    ends = torch.cumsum(torch.tensor(lengths), 0)
    borders = torch.searchsorted(rows, ends).tolist()
    cut: list[Segment] = []
    row, token = 0, 0
    for border, end in zip(borders, ends.tolist(), strict=True):
        while row < border:
            stop = min(border, row + CHUNK_ROWS)
            cut.append(Segment(row, stop, token, int(rows[stop - 1]) + 1, int(rows[row]) + 1))
            row = stop
        token = end
    return cut


def ttt_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    extra_keys: Tensor,
    extra_values: Tensor,
    rows: Tensor,
    cut: list[Segment],
) -> Tensor:
    """query `[R, q, D]`; key, value `[N, kv, D]` of step 0; extra_keys, extra_values `[s, R, kv, D]` of the
    rows' own later steps; rows `[R]`. Returns `[R, q*D]`, differentiable in all five."""
    return _TTTAttention.apply(query, key, value, extra_keys, extra_values, rows, cut)


def _wide(x: Tensor) -> torch.dtype:
    """What softmax is computed in: float32, or better where the tensors are."""
    return torch.promote_types(x.dtype, torch.float32)


class _TTTAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        extra_keys: Tensor,
        extra_values: Tensor,
        rows: Tensor,
        cut: list[Segment],
    ) -> Tensor:
        out = torch.empty_like(query)
        room = _Room(2, cut, query, len(extra_keys))
        for piece in cut:
            part = _Piece(piece, query, key, value, extra_keys, extra_values, rows)
            weights = part.weights(room)
            mixed = torch.bmm(part.tokens_of(weights), part.value) + part.mix(weights, part.extra_value)
            out[part.slice] = part.ungroup(mixed)
        ctx.save_for_backward(query, key, value, extra_keys, extra_values, rows)
        ctx.cut = cut
        return out.flatten(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Gradients of one softmax over two parts. Of one row and query head, with `j` over the keys of step 0 that it
        sees and over its own later ones alike:

            z_j = scale * q . k_j     w = softmax(z)     o = sum_j w_j v_j

        and with g = dL/do, since dw_j/dz_i = w_j (1[i = j] - w_i):

            dL/dv_j = w_j g
            dL/dz_j = w_j (g . v_j - sum_i w_i g . v_i)
            dL/dq   = scale * sum_j dL/dz_j k_j          dL/dk_j = scale * dL/dz_j q

        A key of step 0 collects from all rows that see it and, like any key, from all query heads of its group; a later
        key has one row alone. The weights are made again, chunk by chunk, as in the forward.

        Suffixes: r rows of a piece, R of all; s later steps; q query heads, k key heads, G = q/k; D head size; L the
        keys of a piece, those of step 0 first, then the later ones. `krG` is a row for each query head of a key head.
        """
        query, key, value, extra_keys, extra_values, rows = ctx.saved_tensors
        grad_RqD = grads[0].view_as(query)
        grad_query = torch.empty_like(query)
        grad_key = torch.zeros(key.shape, dtype=_wide(query), device=key.device)
        grad_value = torch.zeros_like(grad_key)
        grad_extra_keys, grad_extra_values = torch.empty_like(extra_keys), torch.empty_like(extra_values)
        room = _Room(3, ctx.cut, query, len(extra_keys))
        for piece in ctx.cut:
            part = _Piece(piece, query, key, value, extra_keys, extra_values, rows)
            w_krGL = part.weights(room)
            g_krGD = part.group(grad_RqD[part.slice])
            gv_krGL = part.products(g_krGD, part.value, part.extra_value, room)
            dz_krGL = torch._softmax_backward_data(gv_krGL, w_krGL, -1, query.dtype, grad_input=part.room(room, 2))
            dq_krGD = torch.bmm(part.tokens_of(dz_krGL), part.key) + part.mix(dz_krGL, part.extra_key)
            grad_query[part.slice] = part.ungroup(dq_krGD.mul_(part.scale))
            tokens = slice(piece.token_start, piece.token_end)
            grad_key[tokens] += torch.bmm(part.tokens_of(dz_krGL).mT, part.query).transpose(0, 1)
            grad_value[tokens] += torch.bmm(part.tokens_of(w_krGL).mT, g_krGD).transpose(0, 1)
            grad_extra_keys[:, part.slice] = part.own(dz_krGL, part.query)
            grad_extra_values[:, part.slice] = part.own(w_krGL, g_krGD)
        return (
            grad_query,
            grad_key.to(key.dtype),
            grad_value.to(value.dtype),
            grad_extra_keys,
            grad_extra_values,
            None,
            None,
        )


class _Room:
    """`count` buffers, each large enough for the scores of any piece: memory that is new to the process costs more than
    most of what is done in it."""

    def __init__(self, count: int, cut: list[Segment], query: Tensor, extra: int) -> None:
        heads = query.shape[1]
        size = max((heads * (p.row_end - p.row_start) * _width(p, extra) for p in cut), default=0)
        self.buffers = [query.new_empty(size) for _ in range(count)]


def _width(piece: Segment, extra: int) -> int:
    """Scores of a row: of the tokens, of `extra` later keys, and what fills them up."""
    return -(-(piece.token_end - piece.token_start + extra) // ALIGNED) * ALIGNED


class _Piece:
    """One segment with the query heads of a key head laid side by side: `[kv, r*G, ..]`."""

    def __init__(
        self,
        piece: Segment,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        extra_keys: Tensor,
        extra_values: Tensor,
        rows: Tensor,
    ) -> None:
        self.slice = slice(piece.row_start, piece.row_end)
        tokens = slice(piece.token_start, piece.token_end)
        self.kv = key.shape[1]
        self.groups = query.shape[1] // self.kv
        self.scale = query.shape[2] ** -0.5
        self.extra = len(extra_keys)
        self.width = _width(piece, self.extra)
        self.query = self.group(query[self.slice]).mul_(self.scale)  # [kv, r*G, D]
        self.key = key[tokens].transpose(0, 1)  # [kv, T, D]
        self.value = value[tokens].transpose(0, 1)
        self.extra_key = extra_keys[:, self.slice].permute(2, 1, 0, 3)  # [kv, r, s, D]
        self.extra_value = extra_values[:, self.slice].permute(2, 1, 0, 3)
        self.common = piece.common_end - piece.token_start
        last = rows[self.slice] - piece.token_start
        later = torch.arange(self.common, self.key.shape[1], device=rows.device)
        self.unseen = (later > last[:, None])[:, None]  # [r, 1, T - common]

    def room(self, room: _Room, number: int) -> Tensor:
        """A buffer as `[kv, r*G, L]`."""
        shape = (self.kv, self.query.shape[1], self.width)
        return room.buffers[number][: shape[0] * shape[1] * shape[2]].view(shape)

    def group(self, x: Tensor) -> Tensor:
        """`[r, q, D]` to a new `[kv, r*G, D]`."""
        r, _, d = x.shape
        grouped = x.new_empty(self.kv, r, self.groups, d)
        grouped.copy_(x.view(r, self.kv, self.groups, d).transpose(0, 1))
        return grouped.view(self.kv, r * self.groups, d)

    def ungroup(self, x: Tensor) -> Tensor:
        """`[kv, r*G, D]` to `[r, q, D]`."""
        return self._by_row(x).transpose(0, 1).flatten(1, 2)

    def _by_row(self, x: Tensor) -> Tensor:
        """`[kv, r*G, ..]` to `[kv, r, G, ..]`."""
        return x.view(self.kv, -1, self.groups, x.shape[-1])

    def tokens_of(self, x: Tensor) -> Tensor:
        """`[kv, r*G, L]` to its part for the tokens, `[kv, r*G, T]`."""
        return x[..., : self.key.shape[1]]

    def extra_of(self, x: Tensor) -> Tensor:
        """`[kv, r*G, L]` to its part for the later keys, `[kv, r, G, s]`."""
        start = self.key.shape[1]
        return self._by_row(x)[..., start : start + self.extra]

    def products(self, x: Tensor, key: Tensor, extra: Tensor, room: _Room) -> Tensor:
        """`[kv, r*G, L]`: of each row of `x` `[kv, r*G, D]` with all of `key` `[kv, T, D]` and its own of `extra` `[kv,
        r, s, D]`; what fills the rows up is 0. In the first buffer."""
        found = self.room(room, 0)
        torch.bmm(x, key.mT, out=self.tokens_of(found))
        self.extra_of(found).copy_(self._by_row(x) @ extra.mT)
        found[..., self.key.shape[1] + self.extra :] = 0
        return found

    def mix(self, weights: Tensor, extra: Tensor) -> Tensor:
        """`[kv, r*G, D]`: what the later keys' weights of `[kv, r*G, L]` take of `extra` `[kv, r, s, D]`."""
        return (self.extra_of(weights) @ extra).flatten(1, 2)

    def own(self, weights: Tensor, x: Tensor) -> Tensor:
        """`[s, r, kv, D]`: what each row's later keys collect, by weights `[kv, r*G, L]`, of `x` `[kv, r*G, D]`."""
        return (self.extra_of(weights).mT @ self._by_row(x)).permute(2, 1, 0, 3)

    def weights(self, room: _Room) -> Tensor:
        """Softmax over both parts, `[kv, r*G, L]`, in the second buffer."""
        scores = self.products(self.query, self.key, self.extra_key, room)
        by_row = self._by_row(scores)
        by_row[..., self.common : self.key.shape[1]].masked_fill_(self.unseen, float("-inf"))
        scores[..., self.key.shape[1] + self.extra :] = float("-inf")
        return torch.softmax(scores, -1, out=self.room(room, 1))
