"""How P-EAGLE heads learn: all positions of a draft from every row of a text, in one forward.

Row `t` of a step `s` drafts what row `t` of training-time test drafts there (`draft/alignment.py`) and is taught by the
same teacher with the same weight. It sees the same keys too, those of step 0 up to `t` and its own of the steps
between, so that the attention is training-time test's and the naive square of `S` copies of a text never exists
(`train/attention.py`). Unlike there no step waits for the one before; the tie alone does, and is given the text's own
tokens.

Shapes: N packed tokens, R_s rows of step `s`, H head's hidden size, r width of the tie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from tercel.chat.conversation import TokenizedChat
from tercel.draft import DraftHead, DraftVocabulary
from tercel.draft.alignment import RowPlan, plan_rows, token_in
from tercel.methods.p_eagle.module import PEagleConfig, PEagleHead
from tercel.target_model.protocol import TargetModel
from tercel.target_model.structure import default_feature_layers
from tercel.train.eagle3 import initialise_from_target
from tercel.train.feature_store import FeatureStore
from tercel.train.goals import Batch, Extent, TTTResult, loss_of_steps, row_goals
from tercel.train.lesson import Lesson
from tercel.train.ttt import embedded, roll


class PEagleLesson(Lesson):
    """With the objective of the settings; a head has as many positions as that has steps."""

    head_class = PEagleHead

    def new_config(self, target: TargetModel, draft_vocab_size: int) -> PEagleConfig:
        run = self.config
        sizes = PEagleConfig.for_target(
            target.config,
            feature_layers=run.feature_layers or default_feature_layers(target.num_layers),
            vocab_size=target.vocab_size,
            draft_vocab_size=draft_vocab_size,
            max_position_embeddings=target.context_length,
            fc_norm=run.fc_norm,
        )
        return replace(sizes, num_parts=run.ttt_steps, tie_size=run.tie_size)

    def initialise(
        self,
        head: DraftHead,
        target: TargetModel,
        vocabulary: DraftVocabulary,
        chats: Sequence[TokenizedChat],
        store: FeatureStore | None,
    ) -> None:
        assert isinstance(head, PEagleHead)
        initialise_from_target(head, target, vocabulary, chats, store)

    def learn(self, head: DraftHead, batch: Batch, to_draft: Tensor, *, whole: Extent | None = None) -> TTTResult:
        return self._taught(head, batch, to_draft, whole, every_draft=False)

    def rehearse(self, head: DraftHead, batch: Batch, to_draft: Tensor, *, whole: Extent | None = None) -> TTTResult:
        return self._taught(head, batch, to_draft, whole, every_draft=True)

    def _taught(
        self, head: DraftHead, batch: Batch, to_draft: Tensor, whole: Extent | None, *, every_draft: bool
    ) -> TTTResult:
        assert isinstance(head, PEagleHead)
        plan = plan_rows(batch.supervised.cpu(), batch.lengths, self.objective.steps)
        said = said_in_one(head, batch, plan)
        wanted = [row_goals(batch, to_draft, self.objective, plan, step, whole) for step in range(len(said))]
        weight = head.lm_head.weight
        if head.config.tie_size:
            weight = torch.cat([weight, head.lm_tie.weight], 1)
        return loss_of_steps(said, wanted, weight, batch, self.objective, plan, every_draft=every_draft)


def said_in_one(head: PEagleHead, batch: Batch, plan: RowPlan) -> list[Tensor]:
    """What the output layers take of the rows of each of `plan`'s steps, output and tie side by side `[R_s, H + r]`, as
    far as the head drafts."""
    embeddings, fused = embedded(head, batch), head.fuse(batch.features)
    plan = RowPlan(plan.rows[: head.config.num_parts], plan.subset[: head.config.num_parts])

    def read(step: int, rows: Tensor, kept: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        return head.unknown(embeddings[token_in(rows, 0)], fused[rows], step)

    said, path = list[Tensor](), None
    for step, output in enumerate(roll(head, batch, plan, embeddings, fused, read)):
        own = head.norm(output)
        if not head.config.tie_size:
            said.append(own)
        elif step == 0:  # has read the token before
            said.append(F.pad(own, (0, head.config.tie_size)))
        else:
            rows, kept = (which[step].to(own.device) for which in (plan.rows, plan.subset))
            path = head.tie(own, embeddings[token_in(rows, step)], None if path is None else path[kept])
            said.append(torch.cat([own, path], -1))
    return said
