"""How EAGLE-3 heads learn: training-time test, from a head that has what it can take of its target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch
from torch import Tensor

from tercel.chat.conversation import TokenizedChat
from tercel.draft import DraftHead, DraftVocabulary, Eagle3Head, HeadConfig
from tercel.draft.eagle3 import FusingHead
from tercel.errors import TercelError
from tercel.target_model.protocol import TargetModel
from tercel.target_model.structure import default_feature_layers
from tercel.train.chance import dropping, generator_of, noised
from tercel.train.config import DRAFTS, LAST_LAYER, TrainConfig
from tercel.train.encoding import encode_group
from tercel.train.feature_store import FeatureStore
from tercel.train.goals import Batch, Extent, TTTResult
from tercel.train.last_layer import take_last_layer
from tercel.train.lesson import Lesson
from tercel.train.losses import CHUNK_ROWS
from tercel.train.ttt import training_time_test

SAMPLE_CHATS = 8


class Eagle3Lesson(Lesson):
    """The paper's, with the objective of the settings (spec sections 2, 4 and 5)."""

    head_class = Eagle3Head

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        self.keeps_hidden = config.feature_loss > 0
        self._embed: Callable[[Eagle3Head, Tensor], Tensor] | None = None  # of draft ids `[R]`, where drafts are read

    def new_config(self, target: TargetModel, draft_vocab_size: int) -> HeadConfig:
        config = HeadConfig.for_target(
            target.config,
            feature_layers=self.config.feature_layers or default_feature_layers(target.num_layers),
            vocab_size=target.vocab_size,
            draft_vocab_size=draft_vocab_size,
            max_position_embeddings=target.context_length,
            fc_norm=self.config.fc_norm,
            norm_output=self.config.norm_output,
        )
        return replace(
            config,
            intermediate_size=self.config.mlp_width or config.intermediate_size,
            num_decoder_layers=self.config.head_layers,
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
        size = take_last_layer(head, target) if self.config.layer_start == LAST_LAYER else 1.0
        initialise_from_target(head, target, vocabulary, chats, store, size)

    def freeze(self, head: DraftHead) -> None:
        assert isinstance(head, Eagle3Head)
        c = head.config
        if self.config.feature_loss and c.hidden_size != c.target_hidden_size:
            raise TercelError(
                f"a head of width {c.hidden_size} has no distance from features of width {c.target_hidden_size}; "
                "leave out feature_loss"
            )
        head.lm_head.requires_grad_(not self.config.freeze_lm_head)

    def begin(self, target: TargetModel, vocabulary: DraftVocabulary) -> None:
        if self.config.step_inputs == DRAFTS:
            ids = vocabulary.ids.to(target.device)

            def embed(head: Eagle3Head, drafts: Tensor) -> Tensor:
                return (head.embed_tokens if head.config.own_embeddings else target.embed)(ids[drafts])

            self._embed = embed

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
            return self._taught(head, batch, to_draft, whole, every_draft=False, read=self._reader(head))

    def _reader(self, head: Eagle3Head) -> Callable[[Tensor], Tensor] | None:
        """Of a step's outputs `[R, H]` the embeddings `[R, H]` of what they draft; None where the text is read."""
        embed = self._embed
        if embed is None:
            return None

        def read(output: Tensor) -> Tensor:
            with torch.no_grad():
                drafts = torch.cat([head.logits(part).max(-1).indices for part in output.split(CHUNK_ROWS)])
            return embed(head, drafts)

        return read

    def rehearse(self, head: DraftHead, batch: Batch, to_draft: Tensor, *, whole: Extent | None = None) -> TTTResult:
        assert isinstance(head, Eagle3Head)
        return self._taught(head, batch, to_draft, whole, every_draft=True)

    def _taught(
        self,
        head: Eagle3Head,
        batch: Batch,
        to_draft: Tensor,
        whole: Extent | None,
        *,
        every_draft: bool,
        read: Callable[[Tensor], Tensor] | None = None,
    ) -> TTTResult:
        return training_time_test(
            head,
            batch,
            to_draft,
            self.objective,
            whole=whole,
            every_draft=every_draft,
            feature_weight=self.config.feature_loss,
            read=read,
        )


@torch.no_grad()
def initialise_from_target(
    head: FusingHead,
    target: TargetModel,
    vocabulary: DraftVocabulary,
    chats: Sequence[TokenizedChat],
    store: FeatureStore | None = None,
    size: float = 1.0,
) -> None:
    """Give the head the target's output rows of its draft tokens (spec section 2), and scale `fc` to the
    features.

    Residual streams are not normalised: their size grows with depth and differs between models. With `fc`
    drawn at one fixed scale the fused hidden drowns what attention and MLP add to it, and most of a small
    training run goes into shrinking it. So each layer's block of `fc` is drawn such that the fused hidden has
    the wanted `size` and every layer the same share in it (median over tokens: the first token's size is far off in
    many models). Dividing every single channel by its size was tried too and learned more slowly.
    """
    head.lm_head.weight.copy_(target.output_rows(vocabulary.ids))
    layers = head.config.feature_layers
    if head.config.fc_norm:  # normed before they are fused
        head.fc.weight.normal_(std=size * head.fc.in_features**-0.5)
        return
    sizes = []  # root mean square of each captured layer, a line a chat
    for chat in chats[:SAMPLE_CHATS]:
        (encoded,) = encode_group(target, layers, [chat]) if store is None else [store.read(chat, target.dtype)]
        captured = encoded.features.to(target.device).chunk(len(layers), -1)
        sizes.append(torch.stack([layer.float().pow(2).mean(-1).sqrt().median() for layer in captured]))
    scale = torch.stack(sizes).median(0).values.clamp(min=1e-6)
    for block, own in zip(head.fc.weight.chunk(len(layers), dim=1), scale.tolist(), strict=True):
        block.normal_(std=size / (own * head.fc.in_features**0.5))
