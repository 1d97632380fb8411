"""Training-time test: the head is fed its own outputs while it learns (paper section 3.2, spec sections 3-5).

Prompt tokens are context only: they give keys and values at step 0 and nothing else, so the later steps,
where nearly all the work is, run over supervised rows alone.

Shape legend: N packed tokens, R_s rows that count at step s, U supervised positions, H hidden size of the
head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tercel.draft.alignment import RowPlan, plan_rows, predicted, rope_position, teacher, token_in
from tercel.draft.head import Eagle3Head
from tercel.train.attention import segments, ttt_attention
from tercel.train.losses import LossKind, StepLoss, Teacher, draft_loss


@dataclass(frozen=True)
class Batch:
    """Packed sequences with what the target said about them.

    tokens int64 `[N]`; lengths of the sequences; supervised bool `[N]`; features `[N, n*Ht]`; embeddings `[N,
    H]` of the tokens; teacher rows and `teacher_row` int64 `[N]`, the row of each position in it (-1: none).
    """

    tokens: Tensor
    lengths: list[int]
    supervised: Tensor
    features: Tensor
    embeddings: Tensor
    teacher: Teacher
    teacher_row: Tensor

    @property
    def positions(self) -> Tensor:
        """int64 `[N]`, of each token in its own sequence."""
        return torch.cat([torch.arange(n) for n in self.lengths]).to(self.tokens.device)


@dataclass(frozen=True)
class Objective:
    """How the steps' losses are made and summed (spec section 5).

    steps `S`; decay `w` of `sum_s w^s loss_s` (`None`: the plain mean of the paper's formula); kind of loss;
    oov: whether rows whose target argmax the head cannot propose are dropped; average over the rows of a
    sequence first, or over all rows at once.
    """

    steps: int = 7
    decay: float | None = 0.8
    kind: LossKind = "soft"
    oov: str = "drop"
    average: str = "sequence"

    def step_weight(self, step: int) -> float:
        return 1.0 / self.steps if self.decay is None else self.decay**step


@dataclass(frozen=True)
class TTTResult:
    """loss: scalar, the sum of the `steps`' weighted losses. plan: the rows behind each step."""

    loss: Tensor
    steps: tuple[StepLoss, ...]
    plan: RowPlan


def training_time_test(
    head: Eagle3Head,
    batch: Batch,
    to_draft: Tensor,
    objective: Objective,
    *,
    share: float = 1.0,
    with_overlap: bool = False,
) -> TTTResult:
    """Run the head `S` steps over its own outputs and sum the losses.

    to_draft int64 `[V]`; share: what the batch counts for in an optimizer step of several batches.
    """
    device = batch.tokens.device
    plan = plan_rows(batch.supervised.cpu(), batch.lengths, objective.steps)
    positions = batch.positions
    total = torch.zeros((), dtype=torch.float32, device=device)
    results: list[StepLoss] = []

    # Step 0 over all tokens: the last of a sequence reads a token that is not its own, but no row sees it.
    every = torch.arange(len(batch.tokens), device=device)
    fused = head.fuse(batch.features)
    first = head.project(batch.embeddings[token_in(every, 0).clamp(max=len(every) - 1)], fused, positions)
    rows = plan.rows[0].to(device)
    hidden, query, residual = fused[rows], first.query[rows], first.residual[rows]
    extra_keys = first.key.new_empty(0, len(rows), *first.key.shape[1:])  # [s, R_s, kv, D]
    extra_values = extra_keys

    for step in range(objective.steps):
        rows = plan.rows[step].to(device)
        if len(rows) == 0:
            break
        if step > 0:
            keep = plan.subset[step].to(device)
            hidden = hidden[keep]
            embedding = batch.embeddings[token_in(rows, step)]
            now = head.project(embedding, hidden, rope_position(positions[rows], step))
            query, residual = now.query, now.residual
            extra_keys = torch.cat([extra_keys[:, keep], now.key[None]])
            extra_values = torch.cat([extra_values[:, keep], now.value[None]])
        cut = segments(plan.rows[step], batch.lengths)
        attended = ttt_attention(query, first.key, first.value, extra_keys, extra_values, rows, cut)
        output = head.finish(residual, attended)
        hidden = head.feedback(output)

        teacher_rows = batch.teacher_row[teacher(rows, step)]
        labels = _labels(batch, to_draft, objective.kind, rows, step, teacher_rows)
        counts = _counts(batch, objective, labels, teacher_rows)
        row_weights = _row_weights(plan.rows[step], batch.lengths, counts, objective.average)
        result = draft_loss(
            head.norm(output),
            head.lm_head.weight,
            batch.teacher,
            teacher_rows,
            labels,
            row_weights * (share * objective.step_weight(step)),
            objective.kind,
            with_overlap,
        )
        total = total + result.loss
        results.append(result)
    return TTTResult(total, tuple(results), plan)


def _labels(batch: Batch, to_draft: Tensor, kind: LossKind, rows: Tensor, step: int, teacher_rows: Tensor) -> Tensor:
    """Draft id `[R_s]` each row should say: the data's token for hard labels, else the target's argmax."""
    if kind == "hard":
        return to_draft[batch.tokens[predicted(rows, step)]]
    return batch.teacher.best[teacher_rows]


def _counts(batch: Batch, objective: Objective, labels: Tensor, teacher_rows: Tensor) -> Tensor:
    """Bool `[R_s]`: whether a row enters the loss."""
    if objective.kind == "hard":
        return labels >= 0
    if objective.oov == "drop":
        return batch.teacher.best[teacher_rows] >= 0
    return torch.ones_like(labels, dtype=torch.bool)


def _row_weights(rows: Tensor, lengths: list[int], counts: Tensor, average: str) -> Tensor:
    """float32 `[R_s]`: the mean over rows that count, within sequences first (0 where none counts) or not."""
    counted = counts.float()
    if average == "token":
        return counted / counted.sum().clamp(min=1)
    sequence_of = torch.searchsorted(torch.cumsum(torch.tensor(lengths), 0), rows, right=True).to(counts.device)
    of_sequence = torch.zeros(len(lengths), device=counts.device).index_add_(0, sequence_of, counted)
    return counted / of_sequence.clamp(min=1)[sequence_of] / len(lengths)
