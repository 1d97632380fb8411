"""Acceptance on held-out text without decoding: the joint-prefix simulation (spec section 10).

Teacher forcing equals decoding as long as every draft so far was right, because then the tokens fed are the
same. So one pass of training-time test over an answer of the target tells, for every row, how many greedy
drafts of a chain would have been accepted there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from tercel.draft.alignment import predicted, teacher
from tercel.draft.head import Eagle3Head
from tercel.train.ttt import Batch, Objective, TTTResult, training_time_test


@dataclass(frozen=True)
class Acceptance:
    """alpha: n-α for n = 0..S-1, the share of right drafts at step n where all before were right.
    tau: `1 + sum_s prod alpha[..s]`, tokens a target forward of an S-step greedy chain, bonus included.
    rows: how many rows step 0 was measured on. loss: mean weighted loss."""

    alpha: tuple[float, ...]
    tau: float
    rows: int
    loss: float


def right_drafts(result: TTTResult, batch: Batch, to_draft: torch.Tensor) -> Iterator[torch.Tensor]:
    """For each step, bool `[R_s]`: whether the row's greedy draft would be accepted, were all before it.

    A row is measured against the target's argmax; where the text is another token (sampled answers), neither would
    be accepted.
    """
    device = batch.tokens.device
    for step, outcome in enumerate(result.steps):
        rows = result.plan.rows[step]
        best = batch.teacher.best[batch.teacher_row[teacher(rows, step).to(device)]]
        text = to_draft[batch.tokens[predicted(rows, step).to(device)]]
        yield (outcome.correct & (best == text)).cpu()


@torch.no_grad()
def simulate(head: Eagle3Head, batches: Iterable[Batch], to_draft: torch.Tensor, objective: Objective) -> Acceptance:
    """Measure greedy chain drafts against the text of `batches` (answers by the target itself)."""
    right = torch.zeros(objective.steps, dtype=torch.double)
    seen = torch.zeros(objective.steps, dtype=torch.double)
    loss, count, rows_total = 0.0, 0, 0
    for batch in batches:
        result = training_time_test(head, batch, to_draft, objective)
        loss, count = loss + float(result.loss), count + 1
        alive = torch.ones(len(result.plan.rows[0]), dtype=torch.bool)
        rows_total += len(alive)
        for step, hit in enumerate(right_drafts(result, batch, to_draft)):
            alive = alive[result.plan.subset[step]]
            seen[step] += int(alive.sum())
            right[step] += int((alive & hit).sum())
            alive = alive & hit
    alpha = (right / seen.clamp(min=1)).tolist()
    tau, prefix = 1.0, 1.0
    for value in alpha:
        prefix *= value
        tau += prefix
    return Acceptance(tuple(alpha), tau, rows_total, loss / max(count, 1))
