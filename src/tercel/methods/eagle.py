"""EAGLE, EAGLE-2 and HASS: one head (`draft/eagle1.py`), two ways to teach it, two kinds of tree.

EAGLE and EAGLE-2 (arXiv 2401.15077, 2406.16858) teach one step on the target's own features, to which noise is added:

    v = mean over the hidden size of SmoothL1(f̂, f)          f the target's feature at the next position, f̂ the head's
    p = - sum over tokens of  p_f log p_f̂                     both through the target's output layer, which is frozen
    loss = v + 0.1 p

HASS (arXiv 2408.15766) teaches three steps, each on the features that the one before it made, which is the context
that a decoder has; a step is no way for gradients into the one before. To each it adds `- sum of p_f log p_f̂` over the
target's ten likeliest tokens. Which context a row has at which step is that of training-time test (`ttt.py`), so the
rows are too.

The target's distribution is over the draft vocabulary, renormalised, as EAGLE-3's is here; with `draft_vocab: 0` it is
whole, as published.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from tercel.decode.eagle3 import Eagle3
from tercel.decode.growth import Growth
from tercel.decode.proposers import EAGLE, EAGLE2, HASS, Parts, ProposerKind
from tercel.draft import DraftHead, DraftModel, DraftVocabulary, Eagle1Config, Eagle1Head, HeadConfig
from tercel.draft.alignment import RowPlan, imitated, plan_rows
from tercel.draft.shape import WIDEST, TreeShape
from tercel.errors import TercelError
from tercel.methods.static_tree import Static, levels_of, node_count
from tercel.target_model.protocol import TargetModel
from tercel.train.config import TrainConfig
from tercel.train.goals import Batch, Extent, RowGoals, TTTResult, loss_of_steps, row_goals, with_more
from tercel.train.lesson import Lesson
from tercel.train.losses import Teacher, feature_distance
from tercel.train.ttt import roll_out

TOKEN_WEIGHT = 0.1  # of `p`, beside 1 of `v`
NOISE = 0.1  # features are moved by a uniform number between minus this and this
TOP_K, TOP_K_WEIGHT, HASS_STEPS = 10, 1.0, 3
PUBLISHED = TreeShape(4, 5, 26)  # the size of EAGLE's own static tree


class EagleLesson(Lesson):
    """EAGLE's and EAGLE-2's. learned: how many steps are taught; held-out chains are as long as the settings say."""

    head_class = Eagle1Head
    learned: ClassVar[int] = 1

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        self.objective = replace(self.objective, steps=max(config.ttt_steps, self.learned), decay=1.0)
        self.rows = torch.empty(0)  # `[W, H]`, the target's output layer for the draft vocabulary

    def new_config(self, target: TargetModel, draft_vocab_size: int) -> HeadConfig:
        return Eagle1Config.for_target(
            target.config,
            feature_layers=(target.num_layers,),
            vocab_size=target.vocab_size,
            draft_vocab_size=draft_vocab_size,
            max_position_embeddings=target.context_length,
        )

    def begin(self, target: TargetModel, vocabulary: DraftVocabulary) -> None:
        self.rows = target.output_rows(vocabulary.ids).detach()

    def learn(self, head: DraftHead, batch: Batch, to_draft: Tensor, *, whole: Extent | None = None) -> TTTResult:
        assert isinstance(head, Eagle1Head)
        return self._taught(head, _noised(batch), batch.features, to_draft, whole)

    def rehearse(self, head: DraftHead, batch: Batch, to_draft: Tensor, *, whole: Extent | None = None) -> TTTResult:
        assert isinstance(head, Eagle1Head)
        return self._taught(head, batch, batch.features, to_draft, whole, chains=True)

    def _taught(
        self,
        head: Eagle1Head,
        batch: Batch,
        truth: Tensor,
        to_draft: Tensor,
        whole: Extent | None,
        *,
        chains: bool = False,
    ) -> TTTResult:
        """truth `[N, H]`: the features that are to be predicted; chains: whether to go on behind what is taught, with
        the drafts of all steps."""
        plan = plan_rows(batch.supervised.cpu(), batch.lengths, self.objective.steps if chains else self.learned)
        said: list[Tensor] = []
        goals: list[RowGoals] = []
        missed: list[Tensor] = []  # of each step, [R_s]: how far each row's feature is off, as weighted
        for step, output in enumerate(roll_out(head, batch, plan, cut=True)):
            goal = row_goals(batch, to_draft, self.objective, plan, step, whole)
            if step >= self.learned:
                goal = goal._replace(weights=torch.zeros_like(goal.weights))
            wanted = truth[imitated(plan.rows[step].to(truth.device), step)]
            said.append(output)
            goals.append(goal)
            missed.append(feature_distance(output, wanted) * goal.weights)
        return with_more(self._tokens(said, goals, batch, plan, chains), missed)

    def _tokens(
        self, said: list[Tensor], goals: list[RowGoals], batch: Batch, plan: RowPlan, chains: bool
    ) -> TTTResult:
        """What the tokens of outputs `[R_s, H]` add to the loss."""
        goals = [goal._replace(weights=goal.weights * TOKEN_WEIGHT) for goal in goals]
        return loss_of_steps(said, goals, self.rows, batch, self.objective, plan, every_draft=chains)


class HassLesson(EagleLesson):
    """HASS's: three steps, each on the features of the one before, and the target's likeliest tokens once more."""

    learned = HASS_STEPS

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        if self.objective.kind != "soft":
            raise TercelError(f"hass learns the target's distribution; leave out loss: {self.objective.kind}")

    def _tokens(
        self, said: list[Tensor], goals: list[RowGoals], batch: Batch, plan: RowPlan, chains: bool
    ) -> TTTResult:
        """Both sums are over `p log q`, so they are one, of a teacher that has no unit mass."""
        probs = batch.teacher.probs
        likeliest = probs.topk(min(TOP_K, probs.shape[1]), -1)
        masses = probs * TOKEN_WEIGHT
        masses.scatter_add_(-1, likeliest.indices, likeliest.values * TOP_K_WEIGHT)
        both = replace(batch, teacher=Teacher(masses, batch.teacher.best))
        objective = replace(self.objective, kind="masses")
        return loss_of_steps(said, goals, self.rows, both, objective, plan, every_draft=chains)


def _noised(batch: Batch) -> Batch:
    """The batch with features `[N, H]` moved at random: the same batch of a run always by the same numbers."""
    chance = torch.Generator().manual_seed(batch.seed)
    noise = torch.empty(batch.features.shape, dtype=batch.features.dtype).uniform_(-NOISE, NOISE, generator=chance)
    return replace(batch, features=batch.features + noise.to(batch.features.device))


class Eagle(Eagle3):
    """EAGLE's drafts: a static tree, whose nodes are settled by ranks before anything is drafted."""

    name = EAGLE

    def __init__(self, draft: DraftModel, target: TargetModel, shape: TreeShape | None = None) -> None:
        super().__init__(draft, target, shape or PUBLISHED)
        self.max_nodes = node_count(self.shape)

    def new_growth(self, rows: int) -> Growth:
        if self.policy is not None:  # which cuts the tree when it is there, and is told what its levels cost
            level_ms, levels = self.policy.costs.table.level_ms, levels_of(self.shape)
            self.policy.step.levels = sum(level_ms(rows * len(level.frontier)) for level in levels if level.frontier)
        return Static(self.shape, rows, self.target.device)


class Eagle2(Eagle3):
    """EAGLE-2's drafts: the dynamic tree that EAGLE-3 has of it."""

    name = EAGLE2


class Hass(Eagle3):
    """HASS's drafts: EAGLE-2's tree, of a head that was taught otherwise."""

    name = HASS


def _head(parts: Parts) -> DraftModel:
    assert parts.head is not None
    parts.head.head_as(Eagle1Head)
    return parts.head


def _shape(parts: Parts, most: TreeShape) -> TreeShape:
    return parts.shape or most.beside(parts.target.tree_support.tree)


STATIC = ProposerKind(
    lambda parts: Eagle(_head(parts), parts.target, _shape(parts, PUBLISHED)),
    needs=("head",),
    about="a head for the next feature: a static tree (arXiv 2401.15077)",
)
DYNAMIC = ProposerKind(
    lambda parts: Eagle2(_head(parts), parts.target, _shape(parts, WIDEST)),
    needs=("head",),
    about="the same head: a tree as large as pays (EAGLE-2, arXiv 2406.16858)",
)
HARMONISED = ProposerKind(
    lambda parts: Hass(_head(parts), parts.target, _shape(parts, WIDEST)),
    needs=("head",),
    about="such a head taught on its own features (arXiv 2408.15766)",
)
