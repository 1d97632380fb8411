"""Where drafting does not pay it is tried again from time to time, the more rarely the more a trial costs."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tercel.decode.chances import Chances
from tercel.decode.costs import HeadCosts, LiveCosts, StepCosts
from tercel.decode.gate import LONGEST_PAUSE, PAUSE, TRIALS, Gate
from tercel.decode.tree_policy import TreePolicy


def trials(gate: Gate, steps: int, gain: float, cost: float) -> list[int]:
    """Steps with drafts, which bring `gain`."""
    found = []
    for step in range(steps):
        if gate.opens():
            found.append(step)
            gate.learn(gain, cost)
    return found


def test_pauses_double_while_nothing_comes_of_it() -> None:
    gate = Gate()
    first = trials(gate, 2000, -0.5, 0.01)
    pauses = [after - before - 1 for before, after in pairwise(first)]
    closed = next(place for place, pause in enumerate(pauses) if pause)
    assert pauses[closed : closed + 6] == [PAUSE, 8, 16, 32, LONGEST_PAUSE, LONGEST_PAUSE]


def test_drafts_that_pay_again_are_made_again() -> None:
    gate = Gate(-0.1)
    assert len(trials(gate, 100, 0.5, 0.3)) > 80
    assert not gate.idle


def test_many_rows_say_sooner_that_nothing_pays() -> None:
    def until_idle(rows: int) -> int:
        gate, steps = Gate(rows=rows), 0
        while not gate.idle:
            gate.learn(-0.1, 0.1)
            steps += 1
        return steps

    assert until_idle(1) > 1.5 * until_idle(2) > 1.5 * until_idle(32)


@pytest.mark.parametrize("cost", [0.3, 2.0, 20.0])
def test_trials_take_a_bounded_share_of_the_time(cost: float) -> None:
    gate, steps = Gate(-0.1), 20_000
    spent = len(trials(gate, steps, -0.2, cost)) * cost
    assert spent / (steps + spent) <= 1.1 * TRIALS


def test_one_size_of_batch_says_nothing_of_another() -> None:
    costs = StepCosts({1: {1: 10.0, 8: 11.0}, 32: {1: 10.0, 8: 100.0}}, head=HeadCosts(0.5, {1: 0.5}))
    policy = TreePolicy(LiveCosts(costs), Chances(), 8)
    for _ in range(40):
        policy.drafted(32, -1.0, 1.0)
    assert policy.idle(32)
    assert policy.idle(48)
    assert not policy.idle(1)
    assert policy.begin([False], 50)
