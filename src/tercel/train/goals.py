"""What a batch holds, and what becomes of the rows that a head computed: what each is to say, how much it counts, and
the loss of all steps.

Shape legend: N packed tokens, R_s rows that count at step s, U supervised positions, H hidden size of the
head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from tercel.draft.alignment import RowPlan, imitated, plan_rows, predicted
from tercel.train.config import Objective
from tercel.train.losses import Teacher, draft_loss


@dataclass(frozen=True)
class Batch:
    """Packed sequences with what the target said about them.

    tokens int64 `[N]`; lengths of the sequences; supervised bool `[N]`; features `[N, n*Ht]`; embeddings `[N,
    Ht]` the target has for the tokens (None for a head with its own, which are parameters of it); what the teacher
    says at the `U` positions before a supervised token, and `taught` int64 `[N]`, which of these each position is (-1:
    none); hidden `[U, Ht]`: the target's last hidden states there, after the final norm, for a lesson that keeps them;
    seed: of whatever chance has a part in what is learned from it; weights float32 `[N]`: how much the row that
    predicts a token counts (None: all alike).
    """

    tokens: Tensor
    lengths: list[int]
    supervised: Tensor
    features: Tensor
    embeddings: Tensor | None
    teacher: Teacher
    taught: Tensor
    hidden: Tensor | None = None
    seed: int = 0
    weights: Tensor | None = None

    @property
    def positions(self) -> Tensor:
        """int64 `[N]`, of each token in its own sequence."""
        return torch.cat([torch.arange(n) for n in self.lengths]).to(self.tokens.device)


@dataclass(frozen=True)
class Extent:
    """What the objective's means are taken over: how many sequences, and at each step how many rows that count (those
    that count less than others, as much as they do).

    The denominators differ from step to step, and all of them belong to the optimizer step: its micro-batches, each
    summed and divided by the extent of them all, teach exactly what one large batch would.
    """

    sequences: int
    rows: tuple[float, ...] = ()

    @classmethod
    def of(cls, batch: Batch, to_draft: Tensor, objective: Objective) -> Extent:
        """The extent of one batch."""
        return cls(len(batch.lengths), tuple(counted_rows(batch, to_draft, objective).tolist()))

    def __add__(self, other: Extent) -> Extent:
        return Extent(
            self.sequences + other.sequences, tuple(a + b for a, b in zip(self.rows, other.rows, strict=True))
        )


def counted_rows(batch: Batch, to_draft: Tensor, objective: Objective) -> Tensor:
    """float32 `[S]`, on the batch's device: how many rows count at each step."""
    device = batch.tokens.device
    plan = plan_rows(batch.supervised.cpu(), batch.lengths, objective.steps)
    counts = [_targets(batch, to_draft, objective, rows.to(device), step)[2] for step, rows in enumerate(plan.rows)]
    return torch.stack([counted.sum() for counted in counts])


@dataclass(frozen=True)
class StepLoss:
    """loss: its part of the sum (scalar, a number only). drafts: `[R_s]`, each row's greedy draft (a draft id), -1
    where it was not asked for. correct: bool `[R_s]`, it is the label."""

    loss: Tensor
    drafts: Tensor
    correct: Tensor


@dataclass(frozen=True)
class TTTResult:
    """loss: scalar, the sum of the `steps`' weighted losses. plan: which rows took part in each step."""

    loss: Tensor
    steps: tuple[StepLoss, ...]
    plan: RowPlan


class RowGoals(NamedTuple):
    """What the rows of a step are to say. taught `[R_s]`: which of the teacher's positions each imitates; labels
    `[R_s]`, draft ids (-1: none); weights float32 `[R_s]`: each one's in the objective's sum, 0 if it has no part."""

    taught: Tensor
    labels: Tensor
    weights: Tensor


def row_goals(
    batch: Batch, to_draft: Tensor, objective: Objective, plan: RowPlan, step: int, whole: Extent | None = None
) -> RowGoals:
    """Those of `plan`'s rows of a step. to_draft, whole: as of `training_time_test`."""
    rows = plan.rows[step].to(batch.tokens.device)
    taught, labels, counts = _targets(batch, to_draft, objective, rows, step)
    weights = (
        _token_weights(counts, None if whole is None else whole.rows[step])
        if objective.average == "token"
        else _sequence_weights(counts, plan.rows[step], batch.lengths, None if whole is None else whole.sequences)
    )
    return RowGoals(taught, labels, weights * objective.step_weight(step))


def loss_of_steps(
    said: Sequence[Tensor],
    wanted: Sequence[RowGoals],
    weight: Tensor,
    batch: Batch,
    objective: Objective,
    plan: RowPlan,
    *,
    every_draft: bool = True,
) -> TTTResult:
    """What becomes of the steps. said, wanted: of each, what its rows `[R_s, H]` gave to the output layer, whose weight
    is `[W, H]`, and what they were to say."""
    if not said:
        return TTTResult(torch.zeros((), dtype=torch.float32, device=batch.tokens.device), (), plan)
    # The loss of all steps at once: no step waits for it, and the output layer's gradient is summed in one place.
    taught, labels, row_weights = (torch.cat(parts) for parts in zip(*wanted, strict=True))
    drafted = None if every_draft else len(said[0])
    lost = draft_loss(
        torch.cat(list(said)),
        weight,
        batch.teacher,
        taught,
        labels,
        row_weights,
        objective.kind,
        drafted=drafted,
    )
    sizes = [len(rows) for rows in said]
    steps = zip(lost.parts.split(sizes), lost.drafts.split(sizes), labels.split(sizes), strict=True)
    return TTTResult(
        lost.loss,
        tuple(StepLoss(parts.sum(), drafts, (drafts == label) & (drafts >= 0)) for parts, drafts, label in steps),
        plan,
    )


def with_more(result: TTTResult, losses: Sequence[Tensor]) -> TTTResult:
    """The result with `losses` of its steps, `[R_s]` each, added to its own."""
    if not losses:
        return result
    steps = zip(result.steps, losses, strict=True)
    return TTTResult(
        result.loss + torch.cat(list(losses)).sum(),
        tuple(replace(step, loss=step.loss + more.detach().sum()) for step, more in steps),
        result.plan,
    )


def _targets(
    batch: Batch, to_draft: Tensor, objective: Objective, rows: Tensor, step: int
) -> tuple[Tensor, Tensor, Tensor]:
    """For the rows of a step: which of the taught positions each imitates, the draft id `[R_s]` each should say (the
    data's token for hard labels, else the target's argmax; -1: none), and float32 `[R_s]`, how much it counts: 0 of one
    that is no part of the loss, 1 where all others count alike."""
    taught = batch.taught[imitated(rows, step)]
    if objective.kind == "hard":
        labels = to_draft[batch.tokens[predicted(rows, step)]]
        counts = (labels >= 0).float()
    else:
        labels = batch.teacher.best[taught]
        counts = (labels >= 0).float() if objective.oov == "drop" else torch.ones(len(labels), device=labels.device)
    return taught, labels, counts if batch.weights is None else counts * batch.weights[predicted(rows, step)]


def _token_weights(counted: Tensor, total: float | None) -> Tensor:
    """float32 `[R_s]`: of a mean over all `total` rows that count (None: those of this batch)."""
    return counted / (counted.sum().clamp(min=1) if total is None else max(total, 1))


def _sequence_weights(counted: Tensor, rows: Tensor, lengths: list[int], total: int | None) -> Tensor:
    """float32 `[R_s]`: of a mean over the rows that count of a sequence (0 where none does), and then over `total`
    sequences (None: those of this batch)."""
    sequence_of = torch.searchsorted(torch.cumsum(torch.tensor(lengths), 0), rows, right=True).to(counted.device)
    of_sequence = torch.zeros(len(lengths), device=counted.device).index_add_(0, sequence_of, counted)
    return counted / of_sequence.clamp(min=1)[sequence_of] / (len(lengths) if total is None else total)
