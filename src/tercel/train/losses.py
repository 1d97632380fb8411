"""Losses of the draft distribution, fused with the output layer.

The draft's logits `[R, W]` are made, differentiated and dropped chunk by chunk, so neither they nor the
target's `[R, V]` logits ever exist as a whole (spec section 5). Gradients are in closed form, with `p` the
teacher's distribution over the draft vocabulary, `q` the draft's, `w` the row's weight:

    soft   -sum p log q          d/dlogits = w (q - p)
    hard   -log q[label]         d/dlogits = w (q - onehot)
    lk     -log sum min(p, q)    d/dlogits = w q (E - [q < p]) / alpha, E = sum_j q_j [q_j < p_j]
                                 (maximises the acceptance probability itself, arXiv 2602.23881)

Shape legend: R rows, U taught positions, H head's hidden size, K target's, W draft vocabulary, V target
vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tercel.draft.vocabulary import DraftVocabulary
from tercel.target_model.protocol import TargetModel
from tercel.train.config import LossKind

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
            best[part] = to_draft[logits.argmax(-1)]
            kept = logits.index_select(1, ids) if vocabulary.pruned else logits
            probs[part] = torch.softmax(kept.float(), -1)
        return cls(probs, best)


@dataclass(frozen=True)
class StepLoss:
    """loss: weighted sum over the rows (scalar, differentiable). drafts: `[R]`, each row's greedy draft (its argmax,
    a draft id). correct: bool `[R]`, it is the label."""

    loss: Tensor
    drafts: Tensor
    correct: Tensor


def draft_loss(
    hidden: Tensor,
    weight: Tensor,
    teacher: Teacher,
    taught: Tensor,
    labels: Tensor,
    row_weights: Tensor,
    kind: LossKind = "soft",
) -> StepLoss:
    """hidden `[R, H]` after the final norm; weight `[W, H]`; taught `[R]`, which of the teacher's
    positions each row imitates; labels `[R]` draft ids (-1: none); row_weights `[R]` float32, 0 drops a row from the
    loss."""
    if not torch.is_grad_enabled():
        weight = weight.detach()  # so that no gradient is made
    loss, drafts = _FusedLoss.apply(hidden, weight, teacher.probs, taught, labels, row_weights, kind)
    return StepLoss(loss, drafts, drafts == labels)


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        probs: Tensor,
        taught: Tensor,
        labels: Tensor,
        row_weights: Tensor,
        kind: LossKind,
    ) -> tuple[Tensor, Tensor]:
        wants_grad, trains_weight = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        drafts = torch.empty(len(hidden), dtype=torch.long, device=hidden.device)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros(weight.shape if trains_weight else (0,), dtype=torch.float32, device=weight.device)
        for start in range(0, len(hidden), CHUNK_ROWS):
            part = slice(start, start + CHUNK_ROWS)
            logits = hidden[part] @ weight.T
            log_q = torch.log_softmax(logits.float(), -1)
            drafts[part] = log_q.argmax(-1)
            p = probs.index_select(0, taught[part]).float()
            value, grad = _value_and_grad(kind, log_q, p, labels[part])
            loss += (value * row_weights[part]).sum()
            if wants_grad or trains_weight:
                grad = grad.mul_(row_weights[part, None]).to(hidden.dtype)
            if wants_grad:
                grad_hidden[part] = grad @ weight
            if trains_weight:
                grad_weight += grad.T @ hidden[part]
        ctx.mark_non_differentiable(drafts)
        ctx.save_for_backward(grad_hidden, grad_weight.to(weight.dtype))
        return loss, drafts

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        upstream = grads[0]
        return (
            grad_hidden * upstream.to(grad_hidden.dtype) if ctx.needs_input_grad[0] else None,
            grad_weight * upstream.to(grad_weight.dtype) if ctx.needs_input_grad[1] else None,
            *(None,) * 5,
        )


def _value_and_grad(kind: LossKind, log_q: Tensor, p: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Loss `[R]` and its gradient `[R, W]` by the draft's logits; consumes `log_q` and `p`."""
    if kind == "soft":
        value = -(p * log_q).sum(-1)
        return value, log_q.exp_().sub_(p)
    if kind == "hard":
        label = labels.clamp(min=0)[:, None]  # rows without a label have weight 0
        value = -log_q.gather(-1, label)[:, 0]
        grad = log_q.exp_()
        grad.scatter_add_(-1, label, torch.full_like(label, -1.0, dtype=grad.dtype))
        return value, grad
    q = log_q.exp_()
    below = (q < p).to(q.dtype)
    alpha = torch.minimum(p, q).sum(-1, keepdim=True).clamp_(min=1e-6)
    inside = (q * below).sum(-1, keepdim=True)
    return -alpha[:, 0].log(), q * (inside - below) / alpha
