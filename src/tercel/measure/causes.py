"""Which known misreading of a head would give the acceptance that a server shows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tercel.chat import TokenizedChat
from tercel.draft import DraftModel
from tercel.draft.acceptance import NAlpha, count_chains
from tercel.draft.shape import TreeShape
from tercel.measure.chains import greedy_chains
from tercel.measure.counts import Counts
from tercel.measure.variants import AS_READ, faults
from tercel.target_model.protocol import TargetModel
from tercel.train.acceptance import walk_all

NEAR = 0.1  # a fault explains what was measured if its tokens a step are within this share of it


@dataclass(frozen=True)
class Cause:
    """setting: what the server would do unlike this package. tau: tokens a step that a greedy chain would then reach.
    distance: how far that is from what was measured (in log-likelihood a draft where the server tells positions, else
    in relative tokens a step). explains: nearer than the head as read, and near."""

    setting: str
    tau: float
    distance: float
    explains: bool
    remedy: str

    def to_json(self) -> dict[str, Any]:
        return {"setting": self.setting, "tau": self.tau, "distance": self.distance, "explains": self.explains}


def rank_causes(
    model: DraftModel,
    target: TargetModel,
    answers: Sequence[TokenizedChat],
    draft: TreeShape,
    counts: Sequence[Counts],
    ratio: float,
) -> tuple[Cause, ...]:
    """Simulate the faults on the target's answers and sort them by how well they match; `ratio` is the server's
    tokens a step over what the head should reach. Causes of equal distance keep the order of `faults`, which is that
    of how often they are met."""
    simulated = []
    for variant in faults(model, target):
        chains = greedy_chains(variant.model, target, answers, draft.depth)
        walked, tau = walk_all(chains)
        # a server counts drafts past an answer's end among the wrong ones, so that every chain is tried to its end
        alpha = count_chains(walked.runs, torch.full_like(walked.runs, draft.depth), draft.depth)
        simulated.append((variant, tau, alpha))
    as_read = simulated[0][1]
    told = draft.top_k == 1 and all(c.per_position is not None for c in counts)
    causes = []
    for variant, tau, alpha in simulated:
        apart = abs(math.log(tau / as_read / ratio))
        distance = _unlikeness(alpha, counts) if told else apart
        causes.append((variant, tau, distance, apart))
    limit = next(distance for variant, _, distance, _ in causes if variant.setting == AS_READ)
    ranked = sorted((c for c in causes if c[0].setting != AS_READ), key=lambda cause: cause[2])
    return tuple(
        Cause(variant.setting, tau, distance, distance < limit and apart < NEAR, variant.remedy)
        for variant, tau, distance, apart in ranked
    )


def _unlikeness(alpha: NAlpha, counts: Sequence[Counts]) -> float:
    """Mean negative log-likelihood of the server's drafts, each right or wrong with the simulated probability of its
    position given that those before were right."""
    total, tries = 0.0, 0.0
    for position, (drafted_right, seen) in enumerate(zip(alpha.right, alpha.seen, strict=True)):
        share = (drafted_right + 0.5) / (seen + 1)
        tried = sum(c.drafts if position == 0 else _at(c, position - 1) for c in counts)
        right = sum(_at(c, position) for c in counts)
        total -= right * math.log(share) + max(tried - right, 0.0) * math.log(1 - share)
        tries += tried
    return total / max(tries, 1.0)


def _at(counts: Counts, position: int) -> float:
    positions = counts.per_position or ()
    return positions[position] if position < len(positions) else 0.0
