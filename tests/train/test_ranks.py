"""Several ranks: the plan dealt out, and a head that is what one rank alone would make."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tercel.target_model.model import Target
from tercel.target_model.sources import Source
from tercel.train.batches import plan_steps, supervised_counts
from tercel.train.config import TrainConfig
from tercel.train.initial import first_head
from tercel.train.learner import Learned, Learner
from tercel.train.ranks import Alone, Ranks, share
from tests.tiny import tiny_model, tiny_tokenizer
from tests.train.worlds import random_chat

CHATS = [random_chat(12 + seed % 5, seed) for seed in range(11)]


@given(sizes=st.lists(st.integers(1, 5), max_size=12), ranks=st.integers(1, 6))
def test_every_micro_batch_is_one_ranks_and_all_have_as_many(sizes: list[int], ranks: int) -> None:
    numbers = iter(range(100))
    plan = [[[next(numbers)] for _ in range(size)] for size in sizes]
    parts = [share(plan, rank, ranks) for rank in range(ranks)]
    for number, step in enumerate(plan):
        assert len({len(part[number]) for part in parts}) == 1  # with empty ones, so that all meet equally often
        mine = [[micro for micro in part[number] if micro] for part in parts]
        assert sorted(micro for some in mine for micro in some) == step
        assert all(some == sorted(some) for some in mine)  # their order is kept
        counts = [len(some) for some in mine]
        assert max(counts) - min(counts) <= 1
        so_far = [sum(bool(micro) for some in part[: number + 1] for micro in some) for part in parts]
        assert max(so_far) - min(so_far) <= 1
    assert share(plan, 0, 1) == plan


class Meeting:
    """Ranks that run side by side in this process and sum by waiting for each other."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.barrier = Barrier(count, timeout=60)
        self.brought: list[Sequence[Tensor]] = [()] * count
        self.sums = 0

    def member(self, number: int) -> Ranks:
        meeting = self

        class Member(Alone):
            rank, count = number, meeting.count

            def sum(self, tensors: Sequence[Tensor]) -> None:
                meeting.brought[number] = tensors
                meeting.barrier.wait()
                totals = [torch.stack(same).sum(0) for same in zip(*meeting.brought, strict=True)]
                meeting.barrier.wait()
                for tensor, total in zip(tensors, totals, strict=True):
                    tensor.copy_(total)
                meeting.sums += number == 0

        return Member()


def learner(config: TrainConfig, ranks: Ranks, dtype: torch.dtype = torch.float32) -> Learner:
    source = Source("llama", "llama", "folder", None)
    target = Target(tiny_model("llama").to(dtype), tiny_tokenizer(), source)  # one a rank, as in processes of their own
    head, vocabulary, _ = first_head(config, target, CHATS, supervised_counts(CHATS, target.vocab_size))
    return Learner(head, vocabulary, target, CHATS, config, plan_steps([len(c) for c in CHATS], config), ranks=ranks)


def learn(one: Learner) -> list[Learned]:
    steps = []
    for number in range(len(one.plan)):
        steps.append(one.gradients(number))
        one.update(steps[-1].lr)
    return steps


@pytest.mark.parametrize("average", ["sequence", "token"])
@pytest.mark.parametrize(("count", "accumulate"), [(2, 2), (2, 3), (3, 2)])
def test_ranks_together_make_the_head_that_one_makes(count: int, accumulate: int, average: str) -> None:
    """Two micro-batches are two summands, so that with one for each of two ranks nothing differs at all; with three
    ranks one has nothing to do in each step."""
    config = TrainConfig(
        epochs=1, batch_tokens=30, accumulate=accumulate, lr=2e-3, ttt_steps=2, draft_vocab=64, average=average,
        feature_layers=(2, 4, 5), weight_decay=0.1,
    )  # fmt: skip
    alone, meeting = learner(config, Alone()), Meeting(count)
    members = [learner(config, meeting.member(number)) for number in range(count)]
    wanted = learn(alone)
    assert len(wanted) > 1
    with ThreadPoolExecutor(count) as pool:
        results = list(pool.map(learn, members))
    assert all(result == results[0] for result in results)
    assert meeting.sums == len(wanted) * (1 if average == "sequence" else 2)
    exact = {"rtol": 0, "atol": 0} if count == accumulate == 2 else {"rtol": 1e-4, "atol": 1e-5}
    for got, step in zip(results[0], wanted, strict=True):
        assert (got.tokens, got.accuracy) == (step.tokens, step.accuracy)
        assert got.loss == pytest.approx(step.loss, rel=1e-6)
        assert got.grad_norm == pytest.approx(step.grad_norm, rel=1e-5)
    for member in members:
        for name, weights in alone.weights.master.named_parameters():
            torch.testing.assert_close(member.weights.master.get_parameter(name), weights, **exact)
