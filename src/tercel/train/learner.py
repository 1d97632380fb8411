"""A head and its optimizer: what one optimizer step learns from its micro-batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tercel.chat.conversation import TokenizedChat
from tercel.draft import DraftHead, DraftVocabulary
from tercel.target_model.protocol import TargetModel
from tercel.train.batches import seed_of
from tercel.train.config import TrainConfig
from tercel.train.encoding import Encoded
from tercel.train.failure import FailedStep, NotFiniteError
from tercel.train.feature_store import FeatureStore
from tercel.train.features import FeatureSupply
from tercel.train.goals import Extent
from tercel.train.lesson import lesson_of
from tercel.train.optimizer import BETAS, HeadOptimizer
from tercel.train.precision import MasterWeights
from tercel.train.ranks import Alone, Ranks, Step, share

SETTLED = round(1 / (1 - BETAS[1]))  # steps: as far back as the mean of squared gradients looks


@dataclass(frozen=True)
class Learned:
    """An optimizer step, over all of its micro-batches. accuracy: share of right drafts at the lesson's first
    step; grad_norm: before clipping; tokens: prompts included."""

    loss: float
    accuracy: float
    lr: float
    grad_norm: float
    tokens: int


@dataclass
class _Counters:
    """Sums over micro-batches: the loss, rows of step 0, those whose draft is right, tokens."""

    loss: float = 0.0
    rows: float = 0
    right: float = 0
    tokens: float = 0

    def summed(self, ranks: Ranks, gradients: Sequence[Tensor]) -> None:
        """Make gradients and counters those of all ranks: the one exchange of an optimizer step's results."""
        counters = torch.tensor(list(vars(self).values()), dtype=torch.float64)
        ranks.sum([*gradients, counters])
        self.loss, self.rows, self.right, self.tokens = counters.tolist()


class Learner:
    """A head that learns: its float32 master weights and their optimizer, and the micro-batches that are this rank's.

    plan: the optimizer steps of the whole run, as indices of `chats`.
    """

    def __init__(
        self,
        head: DraftHead,
        vocabulary: DraftVocabulary,
        target: TargetModel,
        chats: Sequence[TokenizedChat],
        config: TrainConfig,
        plan: Sequence[Step],
        *,
        features: FeatureStore | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.config, self.chats, self.plan = config, chats, plan
        self.ranks = ranks or Alone()
        self.mine = share(plan, self.ranks.rank, self.ranks.count)
        self.lesson = lesson_of(config)
        self.lesson.begin(target, vocabulary)
        self.weights = MasterWeights(head, target.dtype, config.ema)
        self.learning = [p for p in head.parameters() if p.requires_grad]
        self.optimizer = HeadOptimizer(head, config.optimizer, config.weight_decay)
        of_target = target, self.weights.working, vocabulary, features, self.ranks
        keeps_hidden = self.lesson.keeps_hidden
        self.supply = FeatureSupply(*of_target, keeps_hidden=keeps_hidden, prompt_weight=config.prompt_weight)
        self.of_answers = FeatureSupply(*of_target, keeps_hidden=keeps_hidden)  # for what is held out

    def gradients(self, number: int) -> Learned:
        """Make the clipped gradients of optimizer step `number` (from 0), whatever way it is cut:

            extent = what the step's means are taken over, of all micro-batches of all ranks
            for each micro-batch of this rank:                       (nothing is read back from the device here)
                batch  = features and teacher of its chats            features [N, n*Ht], probs [U, W]
                loss   = what the lesson makes of it, each row divided by the extent: a part of the step's loss
                master.grad += d loss / d weights                     working dtype to float32
            gradients, loss and counters = their sums over all ranks
            gradients = gradients * min(1, clip / norm(gradients))

        (N packed tokens of a micro-batch, U of its positions before a supervised token; the rest as in `ttt`.) Since
        every part is divided by the extent of the whole, the sums are what one large batch on one rank would give.
        Raises `NotFiniteError` if loss or gradient are no finite numbers; the weights are as they were.
        """
        groups = [[self.chats[i] for i in indices] for indices in self.mine[number]]
        whole, encoded = self._extent(number, groups)
        done, told = _Counters(), []
        for chats, ready in zip(groups, encoded, strict=True):
            ready = self.supply.encode(chats) if ready is None else ready
            if not chats:  # this rank has none left, and only helped others to encode theirs
                continue
            seed = seed_of(self.config.seed, number, [chat.id for chat in chats])
            batch = replace(self.supply.batch(chats, ready), seed=seed)
            result = self.lesson.learn(self.weights.working, batch, self.supply.to_draft, whole=whole)
            result.loss.backward()
            self.weights.collect_gradients()
            told.append(torch.stack([result.loss.detach(), result.steps[0].correct.sum()]))  # stays on the device
            done.tokens += len(batch.tokens)
            done.rows += len(result.steps[0].correct)
        losses, right = torch.stack(told).T.tolist() if told else ([], [])
        done.loss, done.right = sum(losses), sum(right)
        done.summed(self.ranks, [self._gradient(parameter) for parameter in self.learning])
        norm = float(torch.nn.utils.clip_grad_norm_(self.learning, self.config.clip))
        if not (math.isfinite(done.loss) and math.isfinite(norm)):
            parts = self.ranks.gather(([chats for chats in groups if chats], losses))
            groups, losses = [g for part, _ in parts for g in part], [x for _, part in parts for x in part]
            raise NotFiniteError(FailedStep(number, done.loss, norm, groups, losses))
        rate = self.config.learning_rate(number, len(self.plan))
        return Learned(done.loss, done.right / done.rows, rate, norm, int(done.tokens))

    def settle(self) -> None:
        """Tell the optimizer how large gradients are, from the first steps of the plan, before one moves a weight.

        AdamW divides by that. At its first updates it knows only their own gradients, so that every weight moves
        equally far, whatever it says: a head that has learned forgets. A new one has nothing to lose.
        """
        self.optimizer.forget()  # of an attempt that was interrupted
        for number in range(min(SETTLED, len(self.plan))):
            self.gradients(number)
            self.update(0.0)
        self.optimizer.forget_direction()

    def update(self, rate: float) -> None:
        """Step the master weights along their gradients, and forget these."""
        self.optimizer.step(rate)
        self.weights.refresh()

    def restore(self, head: dict[str, Tensor], optimizer: dict[str, Any], mean: dict[str, Tensor] | None) -> None:
        """Go on with the weights, their mean and the optimizer of a state."""
        self.weights.master.load_state_dict(head)
        self.weights.refresh()
        if self.weights.mean is not None and mean is not None:
            self.weights.mean.load_state_dict(mean)
        self.optimizer.load_state_dict(optimizer)

    def take_first(self) -> None:
        """Give all ranks the first one's weights and optimizer: it may go on from a state."""
        if self.ranks.count == 1:
            return
        mean = [] if self.weights.mean is None else self.weights.mean.parameters()
        is_first, tensors = self.ranks.rank == 0, [p.data for p in (*self.weights.master.parameters(), *mean)]
        own = self.optimizer.state_dict() if is_first else {}
        shapes = self.ranks.gather(_mapped(own, lambda tensor: tensor.to("meta")))[0]
        state = _mapped(own, Tensor.cpu) if is_first else _mapped(shapes, lambda t: torch.empty_like(t, device="cpu"))
        _mapped(state, tensors.append)
        self.ranks.take_first(tensors)
        if not is_first:
            self.optimizer.load_state_dict(state)
            self.weights.refresh()

    def _gradient(self, parameter: Tensor) -> Tensor:
        if parameter.grad is None:  # this rank has no micro-batch in the step
            parameter.grad = torch.zeros_like(parameter)
        return parameter.grad

    def _extent(
        self, number: int, groups: list[list[TokenizedChat]]
    ) -> tuple[Extent | None, Sequence[Sequence[Encoded] | None]]:
        """What the means of optimizer step `number` are taken over, and what the target gave for the micro-batches
        `groups` of this rank, where it had to be asked: which rows count hangs on its choices, and a mean over rows
        needs all of them first.
        """
        objective = self.lesson.objective
        if objective.average == "sequence":
            return Extent(sum(map(len, self.plan[number]))), [None] * len(groups)
        if self.ranks.count == len(groups) == 1:  # that of the only batch
            return None, [None]
        encoded = [self.supply.encode(chats) for chats in groups]
        # each batch is made a second time to learn from it: to keep them would hold a teacher `[U, W]` of every one
        rows = torch.zeros(objective.steps, device=self.supply.to_draft.device)
        for chats, ready in zip(groups, encoded, strict=True):
            if chats:
                rows += self.lesson.counted(self.supply.batch(chats, ready), self.supply.to_draft)
        counts = rows.cpu()
        self.ranks.sum([counts])
        return Extent(sum(map(len, self.plan[number])), tuple(counts.tolist())), encoded


def _mapped(state: Any, change: Callable[[Tensor], Any]) -> Any:
    """A state of an optimizer with its tensors changed, wherever they stand."""
    if isinstance(state, Tensor):
        return change(state)
    if isinstance(state, dict):
        return {name: _mapped(value, change) for name, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(_mapped(value, change) for value in state)
    return state
