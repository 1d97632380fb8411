"""What a method of training is to the trainer: how its heads begin, what they are taught, what they would draft.

A method joins with a file of its own, which may stand in a later room, and a line in `METHODS` (`config.py`). All else
is shared: data, features, loop, ranks, checkpoints, exact resume, held-out acceptance.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

from torch import Tensor

from tercel.chat.conversation import TokenizedChat
from tercel.draft import DraftHead, DraftVocabulary, HeadConfig
from tercel.target_model.protocol import TargetModel
from tercel.train.config import METHODS, TrainConfig
from tercel.train.feature_store import FeatureStore
from tercel.train.goals import Batch, Extent, TTTResult, counted_rows


class Lesson(ABC):
    """How heads of one method learn, under the settings of one run.

    head_class: what it trains; several methods may train the same. keeps_hidden: whether `Batch.hidden` is wanted.
    objective: steps are those of the chains in held-out acceptance, whatever number is learned from.
    """

    head_class: ClassVar[type[DraftHead]]
    keeps_hidden = False

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.objective = config.objective

    @abstractmethod
    def new_config(self, target: TargetModel, draft_vocab_size: int) -> HeadConfig:
        """What a new head for `target` is. Its `feature_layers` are what `Batch.features` will have; `L`, the target's
        depth, stands for its last hidden state, after the final norm."""

    def initialise(  # noqa: B027  (most begin at random)
        self,
        head: DraftHead,
        target: TargetModel,
        vocabulary: DraftVocabulary,
        chats: Sequence[TokenizedChat],
        store: FeatureStore | None,
    ) -> None:
        """Give a new head, on the target's device, what need not be learned. chats: that it will learn from; store:
        what the target gave for them, if it is not to be asked."""

    def freeze(self, head: DraftHead) -> None:  # noqa: B027  (all of most heads learns)
        """Say which weights of a head, new or from elsewhere, do not learn."""

    def begin(self, target: TargetModel, vocabulary: DraftVocabulary) -> None:  # noqa: B027  (most take no more)
        """Before the first step of every run, a resumed one's too: keep what is taken of the target beside batches."""

    def counted(self, batch: Batch, to_draft: Tensor) -> Tensor:
        """float32 `[S]`, on the batch's device: how many rows count at each of the objective's steps, which is what the
        means of a batch in several parts are taken over."""
        return counted_rows(batch, to_draft, self.objective)

    @abstractmethod
    def learn(self, head: DraftHead, batch: Batch, to_draft: Tensor, *, whole: Extent | None = None) -> TTTResult:
        """The loss of a batch, to be differentiated. to_draft int64 `[V]`; whole: the extent of the optimizer step that
        the batch is a part of (None: of the batch itself), so that the losses of the parts sum to that of the whole.
        Of `steps` the first alone needs to have drafts."""

    @abstractmethod
    def rehearse(self, head: DraftHead, batch: Batch, to_draft: Tensor, *, whole: Extent | None = None) -> TTTResult:
        """The greedy chains of all the objective's steps that a decoder would draft on the batch's text, and the loss
        of each step (0 of one that is not learned from). No gradient is wanted."""


def lesson_of(config: TrainConfig) -> Lesson:
    """The lesson of the run's method."""
    module, _, name = METHODS[config.method].partition(":")
    make: Callable[[TrainConfig], Lesson] = getattr(importlib.import_module(module), name)
    return make(config)
