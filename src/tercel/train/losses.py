"""Losses of the draft distribution, fused with the output layer.

The draft's logits `[R, W]` are made, differentiated and dropped chunk by chunk, so neither they nor the
target's `[R, V]` logits ever exist as a whole (spec section 5). Gradients are in closed form, with `p` the
teacher's distribution over the draft vocabulary, `q` the draft's, `w` the row's weight:

    soft   -sum p log q          d/dlogits = w (q - p)
    hard   -log q[label]         d/dlogits = w (q - onehot)
    masses -sum p log q          d/dlogits = w (q sum p - p), of a teacher whose masses do not sum to 1
    lk     -log sum min(p, q)    d/dlogits = w q (E - [q < p]) / alpha, E = sum_j q_j [q_j < p_j]
                                 (maximises the acceptance probability itself, arXiv 2602.23881)

Shape legend: R rows, U taught positions, H head's hidden size, K target's, W draft vocabulary, V target
vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tercel.draft.vocabulary import DraftVocabulary
from tercel.target_model.protocol import TargetModel
from tercel.train.config import RowLoss

CHUNK_ROWS = 512


@dataclass(frozen=True)
class Teacher:
    """The target's view of the supervised positions of a batch.

    probs: `[U, W]`, its distribution restricted to the draft vocabulary and renormalised.
    best: `[U]`, draft id of its argmax, -1 where that is outside the draft vocabulary.
    """

    probs: Tensor
    best: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, target: TargetModel, hidden: Tensor, vocabulary: DraftVocabulary, to_draft: Tensor) -> Teacher:
        """From the target's last hidden states `[U, K]`, in chunks of rows; `to_draft` is `[V]`."""
        ids = vocabulary.ids.to(hidden.device)
        probs = hidden.new_empty(len(hidden), len(vocabulary))
        best = torch.empty(len(hidden), dtype=torch.long, device=hidden.device)
        for start in range(0, len(hidden), CHUNK_ROWS):
            part = slice(start, start + CHUNK_ROWS)
            logits = target.logits(hidden[part])
            best[part] = to_draft[logits.max(-1).indices]  # quicker than argmax, and the same
            kept = logits.index_select(1, ids) if vocabulary.pruned else logits
            torch.softmax(kept, -1, out=probs[part])  # exponentials and their sum in float32 or better
        return cls(probs, best)


@dataclass(frozen=True)
class DraftLoss:
    """loss: weighted sum over the rows (scalar, differentiable). parts: float32 `[R]`, what each row adds to it.
    drafts: `[R]`, each row's greedy draft (its argmax, a draft id), -1 where that was not asked for."""

    loss: Tensor
    parts: Tensor
    drafts: Tensor


def draft_loss(
    hidden: Tensor,
    weight: Tensor,
    teacher: Teacher,
    taught: Tensor,
    labels: Tensor,
    row_weights: Tensor,
    kind: RowLoss = "soft",
    *,
    drafted: int | None = None,
) -> DraftLoss:
    """hidden `[R, H]` after the final norm; weight `[W, H]`; taught `[R]`, which of the teacher's
    positions each row imitates; labels `[R]` draft ids (-1: none); row_weights `[R]` float32, 0 drops a row from the
    loss; drafted: of how many rows, the first ones, the draft is wanted (None: of all)."""
    if not torch.is_grad_enabled():
        weight = weight.detach()  # so that no gradient is made
    wanted = len(hidden) if drafted is None else drafted
    return DraftLoss(*_FusedLoss.apply(hidden, weight, teacher.probs, taught, labels, row_weights, kind, wanted))


def feature_distance(hidden: Tensor, wanted: Tensor) -> Tensor:
    """How far features `[R, K]` are from those that were wanted, float32 `[R]`: the smooth L1 distance (EAGLE's)."""
    return F.smooth_l1_loss(hidden.float(), wanted.float(), reduction="none").mean(-1)


class _FusedLoss(torch.autograd.Function):
    """What the chunks of `[rows, W]` are computed in is the working precision; sums are float32. Each chunk is made in
    the same few buffers: memory that is new to the process costs more than most of what is done in it."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        probs: Tensor,
        taught: Tensor,
        labels: Tensor,
        row_weights: Tensor,
        kind: RowLoss,
        drafted: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        wants_grad, trains_weight = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        parts = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        drafts = torch.full((len(hidden),), -1, dtype=torch.long, device=hidden.device)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros(weight.shape if trains_weight else (0,), dtype=torch.float32, device=weight.device)
        room = _Room(min(CHUNK_ROWS, len(hidden)), weight, probs)
        for start in range(0, len(hidden), CHUNK_ROWS):
            part = slice(start, min(start + CHUNK_ROWS, len(hidden)))
            logits = torch.mm(hidden[part], weight.T, out=room.logits[: part.stop - start])
            if (asked := min(part.stop, drafted)) > start:
                drafts[start:asked] = logits[: asked - start].max(-1).indices  # quicker than argmax, and the same
            value, grad = _value_and_grad(kind, logits, probs, taught[part], labels[part], room)
            parts[part] = value * row_weights[part]
            scale = row_weights[part, None].to(hidden.dtype)  # of rows: cheaper on `[rows, H]` than on `[rows, W]`
            if wants_grad:
                torch.mm(grad, weight, out=grad_hidden[part]).mul_(scale)
            if trains_weight:
                room.add_product(grad_weight, grad.T, hidden[part] * scale)
        ctx.mark_non_differentiable(parts, drafts)
        ctx.save_for_backward(grad_hidden, room.rounded(grad_weight) if trains_weight else grad_weight)
        return parts.sum(), parts, drafts

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        upstream = grads[0]
        return (
            grad_hidden * upstream.to(grad_hidden.dtype) if ctx.needs_input_grad[0] else None,
            grad_weight * upstream.to(grad_weight.dtype) if ctx.needs_input_grad[1] else None,
            *(None,) * 6,
        )


class _Room:
    """Buffers for a chunk of `rows` rows, used again by every chunk. logits, log_q: `[rows, W]`; p: the same in the
    teacher's precision; product: `[W, H]`, for a sum of products that is wider than they are."""

    def __init__(self, rows: int, weight: Tensor, probs: Tensor) -> None:
        self.logits = weight.new_empty(rows, len(weight))
        self.log_q = torch.empty_like(self.logits)
        self.p = probs.new_empty(rows, len(weight))
        self.product = torch.empty_like(weight)
        narrow = weight.dtype.itemsize < torch.float32.itemsize
        self._wide = torch.empty(narrow * max(self.logits.numel(), weight.numel()), device=weight.device)

    def add_product(self, total: Tensor, left: Tensor, right: Tensor) -> None:
        """total += left @ right."""
        if total.dtype == right.dtype:
            total.addmm_(left, right)
        else:
            total += self.widened(torch.mm(left, right, out=self.product))

    def widened(self, x: Tensor) -> Tensor:
        """In float32 or better, as `x` itself or in a buffer that the next one takes."""
        if x.dtype.itemsize >= torch.float32.itemsize:
            return x
        return self._wide[: x.numel()].view(x.shape).copy_(x)

    def rounded(self, total: Tensor) -> Tensor:
        """`[W, H]` in the precision of the products; no product can be made after."""
        return total if total.dtype == self.product.dtype else self.product.copy_(total)


def _value_and_grad(
    kind: RowLoss, logits: Tensor, probs: Tensor, taught: Tensor, labels: Tensor, room: _Room
) -> tuple[Tensor, Tensor]:
    """Loss `[R]`, float32, and its gradient `[R, W]` by the draft's logits; consumes `logits`."""
    if kind == "lk":  # compares p and q, and divides by what may be small: float32
        q, p = torch.softmax(logits, -1, dtype=torch.float32), probs.index_select(0, taught).float()
        below = (q < p).float()
        alpha = torch.minimum(p, q).sum(-1, keepdim=True).clamp_(min=1e-6)
        inside = (q * below).sum(-1, keepdim=True)
        return -alpha[:, 0].log(), (q * (inside - below) / alpha).to(logits.dtype)
    log_q = torch.log_softmax(logits, -1, out=room.log_q[: len(logits)])
    if kind == "hard":
        label = labels.clamp(min=0)[:, None]  # rows without a label have weight 0
        value = -log_q.gather(-1, label)[:, 0].float()
        grad = log_q.exp_()
        grad.scatter_add_(-1, label, torch.full_like(label, -1.0, dtype=grad.dtype))
        return value, grad
    p = torch.index_select(probs, 0, taught, out=room.p[: len(logits)])
    value = -room.widened(torch.mul(p, log_q, out=logits)).sum(-1)
    q = log_q.exp_()
    return value, (q.mul_(p.sum(-1, keepdim=True)) if kind == "masses" else q).sub_(p)
