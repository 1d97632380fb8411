"""How heads learn whose parts all take the target's last hidden state (`last_hidden.py`), Medusa's and Hydra's.

The target is frozen; part `s` of every row learns the token that step `s` of a chain has to say, those before it being
the text's (teacher forcing), and its loss weighs `decay ** s`. That is Medusa-1's objective but for a common factor
(`0.8 ** k` of part `k` from 1), which clipping and AdamW take out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from tercel.chat.conversation import TokenizedChat
from tercel.draft import DraftHead, DraftVocabulary
from tercel.draft.alignment import plan_rows, token_in
from tercel.methods.last_hidden import LastHiddenHead, PartsConfig
from tercel.target_model.protocol import TargetModel
from tercel.train.config import Objective
from tercel.train.feature_store import FeatureStore
from tercel.train.goals import Batch, Extent, RowGoals, StepLoss, TTTResult, loss_of_steps, row_goals
from tercel.train.lesson import Lesson
from tercel.train.losses import DraftLoss, draft_loss


class PartsLesson(Lesson):
    """A part for each of the run's steps."""

    head_class: ClassVar[type[LastHiddenHead]]

    def new_config(self, target: TargetModel, draft_vocab_size: int) -> PartsConfig:
        return self.head_class.config_class.beside(
            target,
            draft_vocab_size,
            num_parts=self.config.ttt_steps,
            num_layers=self.config.part_layers,
            shared_output=self.config.shared_output,
        )

    def initialise(
        self,
        head: DraftHead,
        target: TargetModel,
        vocabulary: DraftVocabulary,
        chats: Sequence[TokenizedChat],
        store: FeatureStore | None,
    ) -> None:
        assert isinstance(head, LastHiddenHead)
        head.initialise(target.output_rows(vocabulary.ids))

    def freeze(self, head: DraftHead) -> None:
        assert isinstance(head, LastHiddenHead)
        for step in range(head.config.num_parts):
            head.output_layer(step).requires_grad_(not self.config.freeze_lm_head)

    def learn(self, head: DraftHead, batch: Batch, to_draft: Tensor, *, whole: Extent | None = None) -> TTTResult:
        assert isinstance(head, LastHiddenHead)
        return parts_loss(head, batch, to_draft, self.objective, whole=whole, every_draft=False)

    def rehearse(self, head: DraftHead, batch: Batch, to_draft: Tensor, *, whole: Extent | None = None) -> TTTResult:
        assert isinstance(head, LastHiddenHead)
        return parts_loss(head, batch, to_draft, self.objective, whole=whole)


def parts_loss(
    head: LastHiddenHead,
    batch: Batch,
    to_draft: Tensor,
    objective: Objective,
    *,
    whole: Extent | None = None,
    every_draft: bool = True,
) -> TTTResult:
    """Every part's loss over the rows that count at its step; those of steps beyond the head's parts are none.

    to_draft, whole, every_draft: as of `training_time_test`. Shapes: R_s rows of step `s`, H hidden size.
    """
    plan = plan_rows(batch.supervised.cpu(), batch.lengths, objective.steps)
    said: list[Tensor] = []  # [R_s, H] a step: what the output layer takes
    goals: list[RowGoals] = []
    for step in range(min(objective.steps, head.config.num_parts)):
        rows = plan.rows[step].to(batch.tokens.device)
        if not len(rows):
            break
        read = None
        if head.reads:
            assert batch.embeddings is not None  # such a head has none of its own
            read = torch.stack([batch.embeddings[token_in(rows, before)] for before in range(step + 1)], 1)
        said.append(head.output(step, batch.features[rows], read))
        goals.append(row_goals(batch, to_draft, objective, plan, step, whole))
    if head.config.shared_output or not said:
        weight = head.output_layer(0).weight
        return loss_of_steps(said, goals, weight, batch, objective, plan, every_draft=every_draft)
    losses = [
        _lost(own, head.output_layer(step).weight, batch, goal, objective, None if every_draft or not step else 0)
        for step, (own, goal) in enumerate(zip(said, goals, strict=True))
    ]
    right = [(lost.drafts == goal.labels) & (lost.drafts >= 0) for lost, goal in zip(losses, goals, strict=True)]
    return TTTResult(
        torch.stack([lost.loss for lost in losses]).sum(),
        tuple(StepLoss(lost.parts.sum(), lost.drafts, own) for lost, own in zip(losses, right, strict=True)),
        plan,
    )


def _lost(
    said: Tensor, weight: Tensor, batch: Batch, goal: RowGoals, objective: Objective, drafted: int | None
) -> DraftLoss:
    return draft_loss(
        said, weight, batch.teacher, goal.taught, goal.labels, goal.weights, objective.kind, drafted=drafted
    )
