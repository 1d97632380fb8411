from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from tercel.decode.draft_tree import DraftTree
from tercel.decode.sampling import RandomStream, SamplingParams
from tercel.decode.types import Proposal
from tercel.measure.drafts import DraftRecorder
from tests.measure.worlds import OwnTree, small_target


@dataclass
class FakeRow:
    tokens: list[int]
    stream: RandomStream
    params: SamplingParams = SamplingParams()  # noqa: RUF009 (frozen)


class Scripted(OwnTree):
    def __init__(self, *proposals: Proposal) -> None:
        super().__init__(small_target())
        self.script = list(proposals)

    def propose(self, rows) -> list[Proposal]:
        return [self.script.pop(0) for _ in rows]


def test_opinions_follow_the_answer_through_the_tree() -> None:
    tree = DraftTree(torch.tensor([9, 4, 5, 6, 7]), torch.tensor([-1, 0, 0, 2, 2]))
    recorder = DraftRecorder(Scripted(Proposal(tree), Proposal(DraftTree.chain(8, [1]))))
    recorder.propose([FakeRow([3, 3, 9], RandomStream(1))])  # prompt 3 3, first token 9
    recorder.propose([FakeRow([3, 3, 9, 5, 8], RandomStream(1))])
    # answer 9 5 8 2: child 5 was taken, 8 was no child, then a chain that was not taken
    drafted = recorder.take(1, 2, (9, 5, 8, 2))
    assert {index: opinion.tokens.tolist() for index, opinion in drafted.items()} == {1: [4, 5], 2: [6, 7], 3: [1]}
    assert drafted[1].favoured(np.full(24, 1 / 24)).tolist() == [4, 5]
    assert recorder.take(1, 2, (9, 5, 8, 2)) == {}  # forgotten


def test_of_sampled_drafts_the_distribution_counts_not_what_was_drawn() -> None:
    q = torch.tensor([0.1, 0.6, 0.3, 0.0])
    recorder = DraftRecorder(Scripted(Proposal(DraftTree.chain(0, [0]), lambda node: q)))
    recorder.propose([FakeRow([2, 0], RandomStream(5))])
    opinion = recorder.take(5, 1, (0, 3))[1]
    assert opinion.probs == pytest.approx([0.6, 0.3, 0.1, 0.0])
    assert sorted(opinion.favoured(np.array([0.05, 0.7, 0.2, 0.05])).tolist()) == [0, 2]
