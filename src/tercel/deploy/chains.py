"""Greedy chains of a head on given answers, without decoding: how many drafts would be accepted at every place.

The joint-prefix simulation (spec section 10) kept row by row: as long as every draft so far was right, teacher
forcing feeds what decoding would. Walking the rows as decoding does (a step from row `t` with `a` accepted drafts
goes on at row `t + a + 1`) gives the very steps of a decoder that starts its chains there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tercel.chat import TokenizedChat
from tercel.draft import DraftModel, DraftVocabulary, Eagle3Head
from tercel.target.model import Target
from tercel.train.acceptance import right_drafts
from tercel.train.features import FeatureSupply
from tercel.train.ttt import Batch, Objective, training_time_test


@dataclass(frozen=True)
class Chains:
    """One answer. runs int64 `[R]`: for each place where a draft could begin, in order, how many drafts of the chain
    are right; room int64 `[R]`: how many tokens of the answer follow there, at most the chain's length."""

    runs: Tensor
    room: Tensor

    def right(self, step: int) -> tuple[int, int]:
        """(right, tried) drafts at `step` of the chain, over all places where those before were right."""
        tried = (self.runs >= step) & (self.room > step)
        return int((tried & (self.runs > step)).sum()), int(tried.sum())

    def walk(self) -> list[int]:
        """Accepted drafts of each step of a decoder; the bonus token comes on top."""
        steps, at = [], 0
        while at < len(self.runs):
            steps.append(int(self.runs[at]))
            at += steps[-1] + 1
        return steps


@torch.no_grad()
def greedy_chains(model: DraftModel, target: Target, answers: Sequence[TokenizedChat], depth: int) -> list[Chains]:
    """Chains of `depth` drafts on `answers`, texts that the target itself chose greedily.

    The first token of an answer is prefill's, so that no draft begins there. Answers too short for a draft are left
    out.
    """
    head = model.eagle3
    supply = FeatureSupply(target, head, model.vocabulary)
    objective = Objective(steps=depth)
    found = []
    for answer in answers:
        chat = _after_first(answer)
        if chat.supervised.any():
            found.append(_chains(head, supply.batch([chat]), supply.to_draft, objective))
    return found


def _chains(head: Eagle3Head, batch: Batch, to_draft: Tensor, objective: Objective) -> Chains:
    result = training_time_test(head, batch, to_draft, objective)
    count = len(result.plan.rows[0])
    runs, room = torch.zeros(count, dtype=torch.long), torch.zeros(count, dtype=torch.long)
    places = torch.arange(count)  # of the rows of this step among those of step 0
    alive = torch.ones(count, dtype=torch.bool)
    for step, hit in enumerate(right_drafts(result, batch, to_draft)):
        places, alive = places[result.plan.subset[step]], alive[result.plan.subset[step]]
        room[places] += 1
        alive = alive & hit
        runs[places[alive]] += 1
    return Chains(runs, room)


def _after_first(answer: TokenizedChat) -> TokenizedChat:
    supervised = answer.supervised.copy()
    supervised[int(supervised.argmax())] = False
    return TokenizedChat(answer.id, answer.tokens, supervised)


def read_as(model: DraftModel, **settings: object) -> DraftModel:
    """The same weights under other settings (`feature_layers`, `norm_before_residual`, `rope_parameters`, …)."""
    own = model.eagle3
    head = Eagle3Head(replace(own.config, **settings))  # type: ignore[arg-type]
    head.load_state_dict(own.state_dict())
    head = head.to(own.device, own.dtype).eval().requires_grad_(False)
    return replace(model, head=head)


def without_map(model: DraftModel) -> DraftModel:
    """The head as a loader without d2t takes it: draft id `i` is token `i`."""
    vocabulary = DraftVocabulary(torch.arange(len(model.vocabulary)), model.vocabulary.target_size)
    return replace(model, vocabulary=vocabulary)
