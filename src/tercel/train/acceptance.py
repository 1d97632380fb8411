"""Acceptance on given text without decoding: the steps that a decoder of greedy chains would make there.

Teacher forcing feeds what decoding would as long as every draft so far was right. So one pass of a head's chains (of
EAGLE-3's: training-time test) over an answer tells, for every place in it, how many drafts of a chain begun there would
be accepted (spec section 10). Walking from the answer's start as decoding does (a step that accepts `a` drafts goes on
`a + 1` tokens further) gives the very steps of a decoder whose target chooses this text. A mean over all places is
higher: decoding begins anew, by construction, right after a draft that failed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tercel.draft.acceptance import NAlpha, acceptance_length, count_chains
from tercel.draft.alignment import predicted, supervised_runs
from tercel.draft.head import DraftHead
from tercel.draft.history import HeldOut
from tercel.train.config import Objective
from tercel.train.goals import Batch, Extent, TTTResult
from tercel.train.lesson import Lesson


@dataclass(frozen=True)
class Chains:
    """One answer. runs int64 `[R]`: for each place where a draft could begin, in order, how many drafts of the chain
    are right; room int64 `[R]`: how many tokens of the answer follow there, at most the chain's length."""

    runs: Tensor
    room: Tensor

    def walk(self) -> Chains:
        """Only the places where a decoder begins its steps: the target's own token comes on top of what it accepts."""
        found, at = [], 0
        while at < len(self.runs):
            found.append(at)
            at += int(self.runs[at]) + 1
        return Chains(self.runs[found], self.room[found])

    def count(self, depth: int) -> NAlpha:
        """What is right at each depth of chains of `depth` drafts, begun at every place."""
        return count_chains(self.runs, self.room, depth)

    @classmethod
    def joined(cls, chains: Sequence[Chains]) -> Chains:
        """Those of several answers as if of one."""
        none = torch.zeros(0, dtype=torch.long)
        return cls(torch.cat([none, *(c.runs for c in chains)]), torch.cat([none, *(c.room for c in chains)]))


def walk_all(chains: Sequence[Chains]) -> tuple[Chains, float]:
    """The steps of a decoder over several answers, and their τ: every place of an answer is a token of a step."""
    steps = Chains.joined([chain.walk() for chain in chains])
    return steps, acceptance_length(sum(len(chain.runs) for chain in chains), len(steps.runs))


def chains_of(result: TTTResult, batch: Batch, to_draft: Tensor) -> list[Chains]:
    """The answers of a batch, turn by turn, in order; those too short for a draft are left out.

    A draft is right where it is the text's token: the text is what the target chose, greedily or by chance. Prefill
    gives an answer's first token, so that no draft predicts that.
    """
    runs = torch.zeros(len(batch.tokens), dtype=torch.long)  # by row
    room, alive = runs.clone(), torch.ones(len(runs), dtype=torch.bool)
    for step, outcome in enumerate(result.steps):
        rows = result.plan.rows[step]
        chosen = to_draft[batch.tokens[predicted(rows, step).to(batch.tokens.device)]]
        alive[rows] &= (outcome.drafts == chosen).cpu()
        room[rows] += 1
        runs[rows] += alive[rows]
    first = result.plan.rows[0]
    opens = torch.zeros(len(runs), dtype=torch.bool)  # by token: whether an answer begins with it
    opens[_answer_starts(batch.supervised.cpu(), batch.lengths)] = True
    drafted = ~opens[predicted(first, 0)]
    turn = torch.cumsum(opens, 0)[predicted(first, 0)]
    kept = [first[drafted & (turn == number)] for number in turn.unique().tolist()]
    return [Chains(runs[rows], room[rows]) for rows in kept if len(rows)]


def _answer_starts(supervised: Tensor, lengths: list[int]) -> Tensor:
    """Indices `[A]` of the supervised tokens that follow none in their sequence."""
    runs = supervised_runs(supervised, lengths)
    goes_on = torch.zeros_like(supervised)
    goes_on[1:] = runs[:-1] > 1
    return torch.nonzero(supervised & ~goes_on)[:, 0]


@dataclass(frozen=True)
class Simulated:
    """What one batch gave: each step's loss, summed; what its mean is taken over; the answers."""

    losses: tuple[float, ...]
    extent: Extent
    chains: list[Chains]


def simulate(lesson: Lesson, head: DraftHead, batches: Iterable[Batch], to_draft: Tensor) -> HeldOut:
    """Measure greedy chains of as many drafts as the objective has steps on the answers of `batches`."""
    return held_out_of([simulate_batch(lesson, head, batch, to_draft) for batch in batches], lesson.objective)


@torch.no_grad()
def simulate_batch(lesson: Lesson, head: DraftHead, batch: Batch, to_draft: Tensor) -> Simulated:
    """The same of one batch."""
    apart = Extent(1, (1,) * lesson.objective.steps)  # sums, to be divided by the extent of all batches
    result = lesson.rehearse(head, batch, to_draft, whole=apart)
    losses = tuple(float(outcome.loss) for outcome in result.steps)
    extent = Extent(len(batch.lengths), tuple(lesson.counted(batch, to_draft).tolist()))
    return Simulated(losses, extent, chains_of(result, batch, to_draft))


def held_out_of(parts: Sequence[Simulated], objective: Objective) -> HeldOut:
    """What all batches together say, in their order."""
    total = Extent(0, (0,) * objective.steps)
    losses = [0.0] * objective.steps
    chains: list[Chains] = []
    for part in parts:
        for step, value in enumerate(part.losses):  # steps for which no row is left have none
            losses[step] += value
        total += part.extent
        chains += part.chains
    counts = total.rows if objective.average == "token" else (total.sequences,) * objective.steps
    loss = sum(value / max(count, 1) for value, count in zip(losses, counts, strict=True))
    walked, tau = walk_all(chains)
    alpha = tuple(value or 0.0 for value in walked.count(objective.steps).alpha)
    return HeldOut(alpha=alpha, tau=tau, steps=len(walked.runs), loss=loss)
