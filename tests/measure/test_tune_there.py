"""What another engine would accept, from one pass over the target's answers, and what follows from its costs."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from tercel.draft.shape import TreeShape
from tercel.errors import TercelError
from tercel.measure.report import FORMATS
from tercel.measure.tune_report import plot_simulation, simulation_table
from tercel.measure.tune_there import (
    Drafted,
    EngineCosts,
    Simulation,
    drafted_chains,
    engine_verdict,
    joint_acceptance,
    read_costs,
    settings_json,
    simulate_drafts,
)
from tercel.train.acceptance import Chains
from tests.overfit import PARAMS, World

DEEP = 5


@pytest.fixture(scope="module")
def found(world: World) -> Simulation:
    shape = TreeShape(3, 2, 6)
    return simulate_drafts(world.target, world.head, world.prompts, PARAMS, longest=DEEP, trees=[shape])


def test_it_is_what_decoding_accepts(world: World, found: Simulation) -> None:
    """Chains of every length, of one pass, are the steps of an engine that drafts such chains."""
    assert found.answers == len(world.prompts)
    for drafted in found.chains:
        decoded = list(world.decoded(world.head, drafted.shape.depth).values())
        assert drafted.tokens == tuple(len(result.tokens) - 1 for result in decoded)
        assert drafted.steps == tuple(result.steps for result in decoded)
    assert found.chains[2].tau.value > 2  # the head knows these answers
    first_drafts = [a > 0 for result in world.decoded(world.head, DEEP).values() for a in result.accepted]
    assert found.acceptance[0] == pytest.approx(sum(first_drafts) / len(first_drafts))
    assert list(found.acceptance) == sorted(found.acceptance, reverse=True)


def test_trees_are_decoded_with(found: Simulation) -> None:
    (tree,) = found.trees
    assert tree.shape == TreeShape(3, 2, 6)
    assert tree.tokens == found.chains[1].tokens
    assert sum(tree.steps) <= sum(found.chains[1].steps)  # it holds that chain


def chains(*runs: int) -> Chains:
    """An answer; the drafts of its places stop at its end."""
    room = torch.arange(len(runs), 0, -1)
    return Chains(torch.minimum(torch.tensor(runs), room), room)


def test_shorter_chains_by_hand() -> None:
    answer = chains(3, 0, 1, 0, 2, 1, 0)
    assert drafted_chains([answer], 1) == Drafted(TreeShape.chain(1), (7,), (4,))  # at 0, 2, 4, 6
    assert drafted_chains([answer], 3) == Drafted(TreeShape.chain(3), (7,), (2,))  # at 0, 4
    assert joint_acceptance([answer], 3) == (1.0, 1.0, 0.5)


def simulated(*taus: float) -> Simulation:
    """Chains of 1, 2, … with these τ, in three answers that differ a little."""
    made = tuple(
        Drafted(TreeShape.chain(depth), tuple(round(1000 * tau * w) for w in (0.98, 1.0, 1.02)), (1000,) * 3)
        for depth, tau in enumerate(taus, 1)
    )
    return Simulation(3, (0.5,), made)


def test_costs_by_hand() -> None:
    costs = EngineCosts({1: 10.0, 3: 14.0}, draft=1.0)
    assert costs.step(None) == 10
    assert costs.step(TreeShape.chain(1)) == 13
    assert costs.step(TreeShape(2, 3, 3)) == 17
    gain = costs.speedup(simulated(1.6).chains[0])
    assert gain.value == pytest.approx(16 / 13)
    assert gain.low < gain.value < gain.high
    served = costs.with_step(TreeShape.chain(4), 26.0)
    assert served.step(TreeShape.chain(4)) == 26
    assert served.step(None) == 10


def test_sentences() -> None:
    four = simulated(1.6, 2.0, 2.3, 2.35)
    told = engine_verdict("vLLM", four, None)
    assert (told.shape, told.speedup) == (TreeShape.chain(3), None)
    assert told.sentence.startswith("draft 3 tokens in vLLM if that pays: a step yields 2.30 [")
    assert "verifying 4 tokens, drafting included, costs less than 2.30 times one token" in told.sentence

    cheap = engine_verdict("vLLM", four, EngineCosts({1: 10.0, 8: 10.5}))
    assert cheap.shape == TreeShape.chain(4)
    assert cheap.sentence.startswith("draft 4 tokens in vLLM: 2.2")

    dear = engine_verdict("vLLM", four, EngineCosts({1: 10.0, 2: 20.0, 8: 80.0}))
    assert (dear.shape, dear.launched) == (None, TreeShape.chain(1))
    assert dear.sentence.startswith("do not speculate in vLLM: the best setting, 1 token, is 0.80 [")
    assert "no sure gain" not in dear.sentence

    even = engine_verdict("vLLM", simulated(1.6), EngineCosts({1: 10.0, 2: 16.0}))
    assert even.shape is None
    assert "no sure gain" in even.sentence

    one = Simulation(1, (0.5,), (Drafted(TreeShape.chain(1), (20,), (10,)),))
    few = engine_verdict("vLLM", one, EngineCosts({1: 10.0, 2: 11.0}))
    assert "give more prompts" in few.sentence
    json.dumps(settings_json(one, None), allow_nan=False)


def test_costs_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    for value, wanted in (
        ({"1": 9.8, "4": 10.4}, EngineCosts({1: 9.8, 4: 10.4})),
        ({"forward_ms": {"1": 9.8}, "draft_ms": 0.7}, EngineCosts({1: 9.8}, 0.7)),
        ({"forward_ms": {"1": 9.8, "64": 20}, "target": "t"}, EngineCosts({1: 9.8, 64: 20.0})),
    ):
        file.write_text(json.dumps(value), encoding="utf-8")
        assert read_costs(file) == wanted
    for text in (
        "",
        "[]",
        "{}",
        '{"2": 3}',
        '{"1": 0}',
        '{"1": "x"}',
        '{"1": null}',
        '{"1": 3, "draft": 4}',
        '{"1": 1e999}',
        '{"forward_ms": 3}',
        '{"forward_ms": {"1": 3}, "draft_ms": -1}',
        '{"forward_ms": {"1": 3}, "draft_ms": "x"}',
    ):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(TercelError, match=r"costs\.json.*forward_ms"):
            read_costs(file)


def test_tables_and_pictures(tmp_path: Path, found: Simulation) -> None:
    costs = EngineCosts({1: 10.0, 8: 12.0})
    assert simulation_table("SGLang", found, None).row_count == DEEP + 1
    assert len(simulation_table("SGLang", found, costs).columns) == 6
    for suffix in FORMATS:
        plot_simulation("SGLang", found, costs, tmp_path / f"a{suffix}")
    one = Simulation(1, (0.5,), (Drafted(TreeShape.chain(1), (20,), (10,)),))
    assert math.isnan(one.chains[0].tau.low)
    plot_simulation("SGLang", one, None, tmp_path / "b.png")
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")
