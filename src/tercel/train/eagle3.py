"""How EAGLE-3 heads learn: training-time test, from a head that has what it can take of its target."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch
from torch import Tensor

from tercel.chat.conversation import TokenizedChat
from tercel.draft import DraftHead, DraftVocabulary, Eagle3Head, HeadConfig
from tercel.errors import TercelError
from tercel.target_model.protocol import TargetModel
from tercel.target_model.structure import default_feature_layers
from tercel.train.chance import dropping, generator_of, noised
from tercel.train.config import TrainConfig
from tercel.train.encoding import encode_group
from tercel.train.feature_store import FeatureStore
from tercel.train.lesson import Lesson
from tercel.train.ttt import Batch, Extent, TTTResult, training_time_test

SAMPLE_CHATS = 8


class Eagle3Lesson(Lesson):
    """The paper's, with the objective of the settings (spec sections 2, 4 and 5)."""

    head_class = Eagle3Head

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        self.keeps_hidden = config.feature_loss > 0

    def new_config(self, target: TargetModel, draft_vocab_size: int) -> HeadConfig:
        return HeadConfig.for_target(
            target.config,
            feature_layers=self.config.feature_layers or default_feature_layers(target.num_layers),
            vocab_size=target.vocab_size,
            draft_vocab_size=draft_vocab_size,
            max_position_embeddings=target.context_length,
            fc_norm=self.config.fc_norm,
            norm_output=self.config.norm_output,
        )

    def initialise(
        self,
        head: DraftHead,
        target: TargetModel,
        vocabulary: DraftVocabulary,
        chats: Sequence[TokenizedChat],
        store: FeatureStore | None,
    ) -> None:
        assert isinstance(head, Eagle3Head)
        initialise_from_target(head, target, vocabulary, chats, store)

    def freeze(self, head: DraftHead) -> None:
        assert isinstance(head, Eagle3Head)
        c = head.config
        if self.config.feature_loss and c.hidden_size != c.target_hidden_size:
            raise TercelError(
                f"a head of width {c.hidden_size} has no distance from features of width {c.target_hidden_size}; "
                "leave out feature_loss"
            )
        head.lm_head.requires_grad_(not self.config.freeze_lm_head)

    def learn(self, head: DraftHead, batch: Batch, to_draft: Tensor, *, whole: Extent | None = None) -> TTTResult:
        assert isinstance(head, Eagle3Head)
        noise, dropout = self.config.feature_noise, self.config.dropout
        with ExitStack() as within:
            if noise or dropout:
                chance = generator_of(batch.seed, batch.features.device)
                if noise:
                    features = noised(batch.features, head.config.num_features, noise, chance)
                    batch = replace(batch, features=features)
                if dropout:
                    within.enter_context(dropping(head, dropout, chance))
            return self._taught(head, batch, to_draft, whole, every_draft=False)

    def rehearse(self, head: DraftHead, batch: Batch, to_draft: Tensor, *, whole: Extent | None = None) -> TTTResult:
        assert isinstance(head, Eagle3Head)
        return self._taught(head, batch, to_draft, whole, every_draft=True)

    def _taught(
        self, head: Eagle3Head, batch: Batch, to_draft: Tensor, whole: Extent | None, *, every_draft: bool
    ) -> TTTResult:
        return training_time_test(
            head,
            batch,
            to_draft,
            self.objective,
            whole=whole,
            every_draft=every_draft,
            feature_weight=self.config.feature_loss,
        )


@torch.no_grad()
def initialise_from_target(
    head: Eagle3Head,
    target: TargetModel,
    vocabulary: DraftVocabulary,
    chats: Sequence[TokenizedChat],
    store: FeatureStore | None = None,
) -> None:
    """Give the head the target's output rows of its draft tokens (spec section 2), and scale `fc` to the
    features.

    Residual streams are not normalised: their size grows with depth and differs between models. With `fc`
    drawn at one fixed scale the fused hidden drowns what attention and MLP add to it, and most of a small
    training run goes into shrinking it. So each layer's block of `fc` is drawn such that the fused hidden has
    unit size and every layer the same share in it (median over tokens: the first token's size is far off in
    many models). Dividing every single channel by its size was tried too and learned more slowly.
    """
    head.lm_head.weight.copy_(target.output_rows(vocabulary.ids))
    layers = head.config.feature_layers
    if head.config.fc_norm:  # normed before they are fused
        head.fc.weight.normal_(std=head.fc.in_features**-0.5)
        return
    sizes = []  # root mean square of each captured layer, a line a chat
    for chat in chats[:SAMPLE_CHATS]:
        (encoded,) = encode_group(target, layers, [chat]) if store is None else [store.read(chat, target.dtype)]
        captured = encoded.features.to(target.device).chunk(len(layers), -1)
        sizes.append(torch.stack([layer.float().pow(2).mean(-1).sqrt().median() for layer in captured]))
    scale = torch.stack(sizes).median(0).values.clamp(min=1e-6)
    for block, size in zip(head.fc.weight.chunk(len(layers), dim=1), scale.tolist(), strict=True):
        block.normal_(std=1.0 / (size * head.fc.in_features**0.5))
