"""How MTP heads learn: training-time test with the modules in a row, the last one again and again.

The target is frozen, its embeddings and output layer too: what learns are the modules. They begin as those of the
target's own checkpoint, where it has some, and else with what its last layer is (`initial.py`).

Shape legend: N packed tokens, R rows of a step, H hidden size, W draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tercel.chat.conversation import TokenizedChat
from tercel.draft import DraftHead, DraftVocabulary, HeadConfig
from tercel.draft.alignment import plan_rows, rope_position, token_in
from tercel.errors import TercelError
from tercel.methods.mtp.attention import TTTKeys
from tercel.methods.mtp.initial import new_config, take_from_target
from tercel.methods.mtp.module import MtpHead
from tercel.methods.mtp.read import modules_of, read_mtp
from tercel.target_model.protocol import TargetModel
from tercel.train.feature_store import FeatureStore
from tercel.train.goals import Batch, Extent, TTTResult, loss_of_steps, row_goals
from tercel.train.lesson import Lesson


class MtpLesson(Lesson):
    """With the objective of the settings, on the target's distribution."""

    head_class = MtpHead

    def new_config(self, target: TargetModel, draft_vocab_size: int) -> HeadConfig:
        found = modules_of(target)
        if found is None:
            return new_config(target, draft_vocab_size)
        return new_config(target, draft_vocab_size, found.modules, found.family.hidden_first)

    def initialise(
        self,
        head: DraftHead,
        target: TargetModel,
        vocabulary: DraftVocabulary,
        chats: Sequence[TokenizedChat],
        store: FeatureStore | None,
    ) -> None:
        assert isinstance(head, MtpHead)
        if modules_of(target) is None:
            take_from_target(head, target)
        else:
            own = read_mtp(target, torch.float32).head_as(MtpHead)
            head.layers.load_state_dict(own.layers.state_dict())

    def freeze(self, head: DraftHead) -> None:
        """A router's corrections balance its experts and are no weights; embeddings and an output layer of its own are
        the target's in all but name."""
        assert isinstance(head, MtpHead)
        if head.config.attention != "sdpa":
            raise TercelError(
                "the layers of this target attend with more than keys and values (eager attention), which training of "
                "MTP modules does not know; train a head of another method for it"
            )
        head.requires_grad_(False)
        for name, parameter in head.layers.named_parameters():
            parameter.requires_grad_("correction_bias" not in name)

    def begin(self, target: TargetModel, vocabulary: DraftVocabulary) -> None:
        self._rows = target.output_rows(vocabulary.ids)

    def learn(self, head: DraftHead, batch: Batch, to_draft: Tensor, *, whole: Extent | None = None) -> TTTResult:
        return self._taught(head, batch, to_draft, whole, every_draft=False)

    def rehearse(self, head: DraftHead, batch: Batch, to_draft: Tensor, *, whole: Extent | None = None) -> TTTResult:
        return self._taught(head, batch, to_draft, whole, every_draft=True)

    def _taught(
        self, head: DraftHead, batch: Batch, to_draft: Tensor, whole: Extent | None, *, every_draft: bool
    ) -> TTTResult:
        """A module's own step runs over all tokens, since the next one reads what it gives; the steps after the last
        module's over the rows that count alone, each of which sees its own later keys as a drafted token does."""
        assert isinstance(head, MtpHead)
        device, steps, last = batch.tokens.device, self.objective.steps, len(head.layers) - 1
        embeddings = head.embed_tokens(batch.tokens) if batch.embeddings is None else batch.embeddings
        plan = plan_rows(batch.supervised.cpu(), batch.lengths, steps)
        every, positions = torch.arange(len(batch.tokens)), batch.positions
        hidden, keys, said = head.fuse(batch.features), TTTKeys(batch.lengths), list[Tensor]()
        for step in range(steps):
            rows = plan.rows[step]
            if len(rows) == 0:
                break
            if step <= last:  # the last rows of a sequence read tokens that are not its own, but none that counts sees
                keys = TTTKeys(batch.lengths).step(every)
                read, at = token_in(every, step).clamp(max=len(every) - 1).to(device), rope_position(positions, step)
                hidden = head.step(step, embeddings[read][None], hidden[None], at[None], ttt_keys=keys)[0]
                output = hidden[rows.to(device)]
            else:
                kept, there = plan.subset[step], rows.to(device)
                at = rope_position(positions[there], step)
                read = token_in(there, step)
                given = output[kept.to(device)]
                now = keys.step(rows, kept)
                output = head.step(last, embeddings[read][None], given[None], at[None], ttt_keys=now)[0]
            said.append(output)
        weight = head.lm_head.weight if head.config.own_output else self._rows
        wanted = [row_goals(batch, to_draft, self.objective, plan, step, whole) for step in range(len(said))]
        return loss_of_steps(said, wanted, weight, batch, self.objective, plan, every_draft=every_draft)
