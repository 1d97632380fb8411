"""Attention of training-time test: one causal block and one extra key a later step, in memory linear in
length.

At step `s`, row `t` attends to the step-0 keys `0..t` of its sequence and to exactly one key of each later
step `1..s`: its own row's (spec section 4). Both parts share one softmax. The forward keeps only the
log-sum-exp of each row; the backward recomputes the scores chunk by chunk, so nothing of size `T x T`
outlives a chunk.

Shape legend: N packed tokens, R rows at this step, s later steps so far, q/kv heads, G = q/kv, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CHUNK_ROWS = 256


@dataclass(frozen=True)
class Segment:
    """Rows `row_start..row_end` belong to one sequence, whose tokens start at `token_start`; they see tokens
    up to `token_end` (exclusive)."""

    row_start: int
    row_end: int
    token_start: int
    token_end: int


def segments(rows: Tensor, lengths: list[int]) -> list[Segment]:
    """Cut the rows (`[R]`, ascending packed indices) at sequence borders and into chunks of `CHUNK_ROWS`."""
    ends = torch.cumsum(torch.tensor(lengths), 0)
    borders = torch.searchsorted(rows, ends).tolist()
    cut: list[Segment] = []
    row, token = 0, 0
    for border, end in zip(borders, ends.tolist(), strict=True):
        while row < border:
            stop = min(border, row + CHUNK_ROWS)
            cut.append(Segment(row, stop, token, int(rows[stop - 1]) + 1))
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
        lse = query.new_empty(query.shape[1], query.shape[0], dtype=_wide(query))  # [q, R]
        for piece in cut:
            part = _Piece(piece, query, key, value, extra_keys, extra_values, rows)
            scores, extra = part.scores()
            total = torch.logaddexp(torch.logsumexp(scores, -1), torch.logsumexp(extra, -1))  # [kv, G*r]
            weights, extra_weights = part.weights(scores, extra, total)
            mixed = weights @ part.value + (extra_weights[..., None] * part.extra_value).sum(-2)
            out[part.slice] = part.ungroup(mixed)
            lse[:, part.slice] = total.view(lse.shape[0], -1)
        ctx.save_for_backward(query, key, value, extra_keys, extra_values, rows, out, lse)
        ctx.cut = cut
        return out.flatten(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Gradients of one softmax over two parts. Of one row and query head, with `j` over the keys of step 0 that it
        sees and over its own later ones alike:

            z_j = scale * q . k_j     w_j = exp(z_j - lse)     o = sum_j w_j v_j

        and with g = dL/do, since dw_j/dz_i = w_j (1[i = j] - w_i):

            dL/dv_j = w_j g
            dL/dz_j = w_j (g . v_j - sum_i w_i g . v_i) = w_j (g . v_j - g . o)
            dL/dq   = scale * sum_j dL/dz_j k_j          dL/dk_j = scale * dL/dz_j q

        `g . o` is the row term, one number of both parts. A key of step 0 collects from all rows that see it and, like
        any key, from all query heads of its group; a later key has one row alone. The weights are made again from
        `lse`, chunk by chunk, as in the forward.

        Suffixes: r rows of a piece, R of all; T tokens of a piece, N of all; s later steps; q query heads, k key heads,
        G = q/k; D head size. `kGr` is a row for each query head of a key head.
        """
        query, key, value, extra_keys, extra_values, rows, out_RqD, lse_qR = ctx.saved_tensors
        grad_RqD = grads[0].view_as(out_RqD)
        grad_query = torch.empty_like(query)
        grad_key = torch.zeros(key.shape, dtype=_wide(query), device=key.device)
        grad_value = torch.zeros_like(grad_key)
        grad_extra_keys, grad_extra_values = torch.empty_like(extra_keys), torch.empty_like(extra_values)
        row_term_qR = (grad_RqD.to(lse_qR.dtype) * out_RqD.to(lse_qR.dtype)).sum(-1).T
        for piece in ctx.cut:
            part = _Piece(piece, query, key, value, extra_keys, extra_values, rows)
            lse_kGr = lse_qR[:, part.slice].reshape(part.kv, -1)
            row_term_kGr1 = row_term_qR[:, part.slice].reshape(part.kv, -1, 1)
            w_kGrT, w_kGrs = part.weights(*part.scores(), lse_kGr)
            g_kGrD = part.group(grad_RqD[part.slice])
            gv_kGrT, gv_kGrs = g_kGrD @ part.value.mT, (g_kGrD[:, :, None] * part.extra_value).sum(-1)
            dz_kGrT = (w_kGrT * (gv_kGrT.to(lse_qR.dtype) - row_term_kGr1) * part.scale).to(query.dtype)
            dz_kGrs = (w_kGrs * (gv_kGrs.to(lse_qR.dtype) - row_term_kGr1) * part.scale).to(query.dtype)
            dq_kGrD = dz_kGrT @ part.key + (dz_kGrs[..., None] * part.extra_key).sum(-2)
            grad_query[part.slice] = part.ungroup(dq_kGrD)
            tokens = slice(piece.token_start, piece.token_end)
            grad_key[tokens] += (dz_kGrT.mT @ part.query).transpose(0, 1)
            grad_value[tokens] += (w_kGrT.mT @ g_kGrD).transpose(0, 1)
            grad_extra_keys[:, part.slice] = part.ungroup_extra(dz_kGrs[..., None] * part.query[:, :, None])
            grad_extra_values[:, part.slice] = part.ungroup_extra(w_kGrs[..., None] * g_kGrD[:, :, None])
        return (
            grad_query,
            grad_key.to(key.dtype),
            grad_value.to(value.dtype),
            grad_extra_keys,
            grad_extra_values,
            None,
            None,
        )


class _Piece:
    """One segment with the query heads of a key head laid side by side: `[kv, G*r, ..]`."""

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
        self.wide = _wide(query)
        self.query = self.group(query[self.slice])  # [kv, G*r, D]
        self.key = key[tokens].transpose(0, 1)  # [kv, T, D]
        self.value = value[tokens].transpose(0, 1)
        self.extra_key = self._group_extra(extra_keys[:, self.slice])  # [kv, G*r, s, D]
        self.extra_value = self._group_extra(extra_values[:, self.slice])
        last = rows[self.slice] - piece.token_start
        unseen = torch.arange(self.key.shape[1], device=rows.device)[None] > last[:, None]  # [r, T]
        self.unseen = unseen.repeat(self.groups, 1)

    def group(self, x: Tensor) -> Tensor:
        """`[r, q, D]` to `[kv, G*r, D]`."""
        r, _, d = x.shape
        return x.view(r, self.kv, self.groups, d).permute(1, 2, 0, 3).reshape(self.kv, self.groups * r, d)

    def ungroup(self, x: Tensor) -> Tensor:
        """`[kv, G*r, D]` to `[r, q, D]`."""
        r, d = x.shape[1] // self.groups, x.shape[2]
        return x.view(self.kv, self.groups, r, d).permute(2, 0, 1, 3).reshape(r, self.kv * self.groups, d)

    def _group_extra(self, x: Tensor) -> Tensor:
        """`[s, r, kv, D]` to `[kv, G*r, s, D]`."""
        return x.permute(2, 1, 0, 3).repeat(1, self.groups, 1, 1)

    def ungroup_extra(self, x: Tensor) -> Tensor:
        """`[kv, G*r, s, D]` to `[s, r, kv, D]`, summed over the query heads of each key head."""
        kv, grouped, s, d = x.shape
        summed = x.view(kv, self.groups, grouped // self.groups, s, d).sum(1)
        return summed.permute(2, 1, 0, 3)

    def scores(self) -> tuple[Tensor, Tensor]:
        """`[kv, G*r, T]` with what a row may not see at -inf, and `[kv, G*r, s]`."""
        scores = (self.query @ self.key.mT).to(self.wide) * self.scale
        scores.masked_fill_(self.unseen, float("-inf"))
        extra = (self.query[:, :, None] * self.extra_key).sum(-1).to(self.wide) * self.scale
        return scores, extra

    def weights(self, scores: Tensor, extra: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        """Softmax over both parts, given its log-sum-exp `[kv, G*r]`."""
        dtype = self.query.dtype
        return (scores - total[..., None]).exp().to(dtype), (extra - total[..., None]).exp().to(dtype)
