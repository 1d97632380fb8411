"""A step carries little to the device and back, however large its tree; nothing there is mixed with the host's.

On a pretended device (`far_device.py`): the machine that runs this has none.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tercel.decode.clock import PhaseClock
from tercel.decode.cost_aware import CostAware
from tercel.decode.costs import HeadCosts, StepCosts
from tercel.decode.eagle3 import Eagle3
from tercel.decode.engine import Engine
from tercel.decode.head_state import HeadWindow
from tercel.decode.proposer import Proposer
from tercel.decode.rules import TokenRules
from tercel.decode.sampled_chain import SampledChain
from tercel.decode.sampling import SamplingParams
from tercel.decode.types import GenerationResult, Request
from tercel.decode.vanilla import Vanilla
from tercel.draft import DraftModel
from tercel.draft.shape import TreeShape
from tercel.target_model.model import Target
from tercel.target_model.sources import Source
from tests.decode.drafts import Oracle, random_draft
from tests.decode.far_device import FAR, FarDevice, on_far_device
from tests.target_model.test_rope import longrope
from tests.tiny import tiny_model, tiny_tokenizer

PROMPTS = [tuple(range(5, 5 + n)) for n in (5, 9, 12)]
NEW, LEVELS = 9, 3
Make = Callable[[DraftModel, Target], Proposer]


def small_tree(draft: DraftModel, target: Target) -> Proposer:
    return Eagle3(draft, target, TreeShape(2, 2, 4))


def large_tree(draft: DraftModel, target: Target) -> Proposer:
    return Eagle3(draft, target, TreeShape(6, 4, 40))


def windowed_tree(draft: DraftModel, target: Target) -> Proposer:
    return Eagle3(draft, target, TreeShape(2, 2, 4), HeadWindow(2, 3))


def sized_tree(draft: DraftModel, target: Target) -> Proposer:
    costs = StepCosts({1: {1: 20.0, 64: 24.0}}, head=HeadCosts(0.5, {1: 0.5, 16: 1.0}))
    return CostAware(Eagle3(draft, target, TreeShape(4, LEVELS, 20)), costs, steady=True)


def sampled_chain(draft: DraftModel, target: Target) -> Proposer:
    return SampledChain(draft, target, 3)


def asked(params: SamplingParams) -> list[Request]:
    return [Request(prompt, params) for prompt in PROMPTS]


def far_world(arch: str) -> tuple[Target, DraftModel]:
    if arch == "longrope":
        target = longrope(border=12)  # which the prompts cross at unlike times
    else:
        model = tiny_model(arch, num_hidden_layers=3)
        target = Target(model, tiny_tokenizer(), Source(arch, arch, "folder", None))
    return target, random_draft(target)


@pytest.fixture(autouse=True)
def synchronised(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    seen: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", seen.append)
    return seen


PARAMS = {
    "greedy": SamplingParams(max_new_tokens=NEW, ignore_eos=True),
    "penalties": SamplingParams(
        max_new_tokens=NEW,
        ignore_eos=True,
        repetition_penalty=1.3,
        presence_penalty=0.2,
        rules=TokenRules(no_repeat_ngram_size=2),
    ),
    "sampled": SamplingParams(
        max_new_tokens=NEW, ignore_eos=True, temperature=1.2, top_k=40, top_p=0.9, min_p=0.01, seed=3
    ),
}


@pytest.mark.parametrize(
    ("arch", "make", "kind"),
    [
        ("llama", large_tree, "greedy"),
        ("llama", large_tree, "sampled"),
        ("gemma3", small_tree, "penalties"),
        ("llama", sampled_chain, "greedy"),
        ("llama", sampled_chain, "sampled"),
        ("llama", windowed_tree, "greedy"),
        ("llama", sized_tree, "greedy"),
        ("longrope", large_tree, "greedy"),
    ],
)
def test_text_is_the_same_there(arch: str, make: Make, kind: str) -> None:
    target, draft = far_world(arch)
    here = Engine(target, make(draft, target), slots=2).generate(asked(PARAMS[kind]))
    with on_far_device(target, draft):
        assert target.device == FAR
        there = Engine(target, make(draft, target), slots=2).generate(asked(PARAMS[kind]))
    assert [result.tokens for result in there] == [result.tokens for result in here]


def travels(make: Make, params: SamplingParams, slots: int) -> tuple[list[dict[str, int]], list[GenerationResult]]:
    """Of every step without a prefill and without an end: what travelled, and whether paths were accepted."""
    target, draft = far_world("llama")
    with on_far_device(target, draft) as device:
        loop = Engine(target, make(draft, target), slots=slots).loop()
        for request in asked(params)[:slots]:
            loop.submit(request)
        loop.step()
        steps, results = [], []
        while loop.pending:
            device.counts.clear()
            events = loop.step()
            if all(event.result is None for event in events):
                steps.append(dict(device.counts))
            results += [event.result for event in events if event.result is not None]
    return steps, results


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("make", [small_tree, large_tree])
def test_a_greedy_step_takes_two_copies_back_whatever_the_tree(make: Make, slots: int) -> None:
    steps, _ = travels(make, PARAMS["greedy"], slots)
    assert len(steps) >= 4
    for step in steps:
        assert step["down"] == 2  # the proposed tree, the verdict
        assert step["up"] <= 5 + slots  # starts twice, tree, paths, tokens; a path that is no prefix
        assert step["down numbers"] < 5000 * slots  # of a vocabulary of 128 and 40 nodes


def test_a_tree_as_large_as_pays_is_settled_on_the_host_level_by_level() -> None:
    steps, _ = travels(sized_tree, PARAMS["greedy"], 1)
    assert 2 < max(step["down"] for step in steps) <= 2 * LEVELS + 1  # two a level, the verdict


def test_vanilla_takes_one_copy_each_way() -> None:
    steps, _ = travels(lambda draft, target: Vanilla(), PARAMS["greedy"], 1)
    assert {(step["up"], step["down"], step["down numbers"]) for step in steps} == {(1, 1, 1)}


def test_an_accepted_path_moves_with_one_index_for_all_layers() -> None:
    target, draft = far_world("llama")
    params = SamplingParams(max_new_tokens=16, ignore_eos=True)
    truth = Engine(target, Vanilla()).generate([Request(PROMPTS[0], params)])[0].tokens
    with on_far_device(target, draft) as device:
        loop = Engine(target, Oracle({PROMPTS[0]: truth})).loop()
        loop.submit(Request(PROMPTS[0], params))
        loop.step()
        device.counts.clear()
        (event,) = loop.step()
    assert event.drafted == 3
    assert (device.counts["up"], device.counts["down"]) == (2, 1)  # tree and path, verdict


@pytest.mark.parametrize("kind", ["sampled", "penalties"])
def test_other_steps_take_one_row_a_visited_node(kind: str) -> None:
    steps, results = travels(large_tree, PARAMS[kind], 1)
    visited = sum(accepted + 1 for accepted in results[0].accepted)
    assert sum(step["down"] for step in steps) <= len(steps) + visited
    assert max(step["up"] for step in steps) <= 6


def test_the_clock_waits_for_the_targets_own_device(synchronised: list[torch.device]) -> None:
    second = torch.device("cuda:1")
    with PhaseClock(second).phase("head"):
        pass
    assert set(synchronised) == {second}
    synchronised.clear()
    PhaseClock(torch.device("cpu")).now()
    assert synchronised == []


def test_the_pretended_device_refuses_what_real_ones_do() -> None:
    with FarDevice() as device:
        far, host = torch.ones(3, device=FAR), torch.ones(3)
        assert (far + 1).sum().cpu() == 6
        assert device.counts == {"down": 1, "down numbers": 1}
        for wrong, why in (
            (lambda: far + host, "mixes"),
            (lambda: far[[0, 1]], "waits; use to_device"),
            (lambda: far.double(), "float64"),
            (lambda: far + torch.tensor([1.0], device=FAR), "waits; use to_device"),
        ):
            with pytest.raises(AssertionError, match=why):
                wrong()
        device.counts.clear()
        assert bool(far.all())
        _ = far[far > 0], far.nonzero(), host.to(FAR), far.max().item()
        assert (device.counts["down"], device.counts["up"]) == (4, 1)
