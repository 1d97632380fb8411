"""Features and teacher for a batch: from the frozen target as training goes, or from files made earlier."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from tercel.chat.conversation import TokenizedChat
from tercel.draft.head import DraftHead
from tercel.draft.vocabulary import DraftVocabulary
from tercel.target_model.protocol import TargetModel
from tercel.train.encoding import Encoded, apart, before_supervised, padded, padding_groups
from tercel.train.feature_store import FeatureStore
from tercel.train.goals import Batch
from tercel.train.losses import Teacher
from tercel.train.ranks import Alone, Ranks
from tercel.train.sharded import encode_all


class FeatureSupply:
    """Makes `Batch`es of chats. store: what the target gave for them is read from there, and its blocks are not run.
    ranks: those of the run; where the target is split over them and asked, all have to call `encode` equally often, if
    need be with no chats. keeps_hidden: whether batches have `hidden`. prompt_weight: how much tokens count that are
    not the assistant's; with 0 they are no part of what is taught."""

    def __init__(
        self,
        target: TargetModel,
        head: DraftHead,
        vocabulary: DraftVocabulary,
        store: FeatureStore | None = None,
        ranks: Ranks | None = None,
        *,
        keeps_hidden: bool = False,
        prompt_weight: float = 0.0,
    ) -> None:
        self.target, self.keeps_hidden, self.prompt_weight = target, keeps_hidden, prompt_weight
        self.ranks = ranks or Alone()
        self.head = head
        self.vocabulary = vocabulary
        self.to_draft = vocabulary.to_draft().to(target.device)
        self.store = store

    @torch.no_grad()
    def batch(self, chats: Sequence[TokenizedChat], encoded: Sequence[Encoded] | None = None) -> Batch:
        """The batch of `chats`; `encoded`: what `encode` gave for them, if it was called before."""
        encoded = self.encode(chats) if encoded is None else encoded
        device = self.target.device
        weights = self._weights(chats)
        chats = self._taught(chats)
        tokens = torch.from_numpy(np.concatenate([c.tokens for c in chats])).long()
        supervised = torch.from_numpy(np.concatenate([c.supervised for c in chats]))
        before = torch.cat([before_supervised(chat) for chat in chats])
        taught = torch.full((len(tokens),), -1, dtype=torch.long)
        taught[before] = torch.arange(int(before.sum()))
        hidden = torch.cat([e.hidden for e in encoded])
        tokens = tokens.to(device)
        return Batch(
            tokens=tokens,
            lengths=[len(c.tokens) for c in chats],
            supervised=supervised,
            features=torch.cat([e.features for e in encoded]),
            embeddings=None if self.head.config.own_embeddings else self.target.embed(tokens),
            teacher=Teacher.of(self.target, hidden, self.vocabulary, self.to_draft),
            taught=taught.to(device),
            hidden=hidden if self.keeps_hidden else None,
            weights=weights,
        )

    @torch.no_grad()
    def encode(self, chats: Sequence[TokenizedChat]) -> list[Encoded]:
        """What the target gives for the chats, or gave."""
        chats = self._taught(chats)
        if self.store is not None:
            read = [self.store.read(chat, self.target.dtype) for chat in chats]
            device = self.target.device
            return [Encoded(one.features.to(device), one.hidden.to(device)) for one in read]
        groups = padding_groups([len(chat) for chat in chats])
        found: dict[int, Encoded] = {}
        for group, encoded in zip(groups, self._run([[chats[i] for i in group] for group in groups]), strict=True):
            found.update(zip(group, encoded, strict=True))
        return [found[place] for place in range(len(chats))]

    def _taught(self, chats: Sequence[TokenizedChat]) -> Sequence[TokenizedChat]:
        """With what is taught of them as supervised."""
        return [chat.whole() for chat in chats] if self.prompt_weight else chats

    def _weights(self, chats: Sequence[TokenizedChat]) -> Tensor | None:
        """float32 `[N]`, of every token; None where all that are taught weigh the same."""
        if not self.prompt_weight:
            return None
        own = torch.from_numpy(np.concatenate([chat.supervised for chat in chats])).to(self.target.device)
        return own.float() * (1 - self.prompt_weight) + self.prompt_weight

    def _run(self, groups: Sequence[Sequence[TokenizedChat]]) -> Iterator[list[Encoded]]:
        """What the target gives for each group."""
        blocks = [padded(chats) for chats in groups]
        outputs = encode_all(self.target, self.ranks, blocks, self.head.config.feature_layers)
        for chats, output in zip(groups, outputs, strict=True):
            yield apart(output, chats)
