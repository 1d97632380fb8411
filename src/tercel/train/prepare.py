"""What a run is made of before its first step: chats, what is held out, the head it begins with, its plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from tercel.chat.conversation import TokenizedChat
from tercel.draft import DraftHead, DraftVocabulary
from tercel.target_model.protocol import TargetModel
from tercel.train.batches import Split, plan_steps, split, supervised_counts, usable
from tercel.train.config import TrainConfig
from tercel.train.feature_store import FeatureStore
from tercel.train.initial import first_head
from tercel.train.ranks import Step


@dataclass(frozen=True)
class Prepared:
    """chats: those that can be learned from, cut; counts int64 `[V]`: how often each token is supervised in training.
    warnings: what speaks against the head; plan: the optimizer steps, as indices of `data.train`."""

    chats: Sequence[TokenizedChat]
    data: Split
    counts: Tensor
    head: DraftHead
    vocabulary: DraftVocabulary
    warnings: tuple[str, ...]
    plan: list[Step]


def prepare(
    target: TargetModel, chats: Sequence[TokenizedChat], config: TrainConfig, store: FeatureStore | None = None
) -> Prepared:
    """store: what the target gave for the chats, if it is not to be asked.

    Raises `TercelError` if data, features or the head to begin with do not fit the target, or the data are too few.
    """
    kept = usable(chats, min(config.max_length, target.context_length), target.vocab_size)
    if store is not None:
        store.require(kept, all_tokens=config.prompt_weight > 0)
    data = split(kept, config.eval_share)
    counts = supervised_counts(data.train, target.vocab_size)
    head, vocabulary, warnings = first_head(config, target, data.train, counts, store)
    plan = plan_steps([len(chat) for chat in data.train], config)
    return Prepared(kept, data, counts, head, vocabulary, warnings, plan)
