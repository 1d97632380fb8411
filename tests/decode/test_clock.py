"""Every second of a step belongs to one phase, and only where it is cheap are a head's forwards told from the rest."""

from __future__ import annotations

import itertools

import pytest
import torch

from tercel.decode import clock
from tercel.decode.clock import PHASES, PhaseClock
from tercel.decode.eagle3 import Eagle3
from tercel.decode.loop import DecodingLoop
from tercel.decode.proposer import PassingOn, Proposer
from tercel.decode.sampled_chain import SampledChain
from tercel.decode.sampling import SamplingParams
from tercel.decode.types import Request
from tercel.decode.vanilla import Vanilla
from tercel.draft.shape import TreeShape
from tests.decode.drafts import random_draft, tiny_target

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
PARAMS = SamplingParams(max_new_tokens=6, ignore_eos=True)


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second passes with every look at the time."""
    seconds = itertools.count()
    monkeypatch.setattr(clock.time, "perf_counter", lambda: float(next(seconds)))


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    seen: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", seen.append)
    return seen


def nested(watch: PhaseClock) -> None:
    watch.restart()
    with watch.phase("target"):
        pass
    with watch.phase("tree"):
        for _ in range(2):
            with watch.phase("head"):
                pass


@pytest.mark.usefixtures("ticking")
def test_a_phase_within_another_has_its_time_for_itself() -> None:
    watch = PhaseClock(CPU)
    nested(watch)
    assert watch.seconds == {"target": 1, "head": 2, "tree": 3, "verify": 0, "cache": 0, "host": 2}


@pytest.mark.usefixtures("ticking")
def test_a_phase_ends_with_its_error() -> None:
    watch = PhaseClock(CPU)
    with pytest.raises(ValueError, match="planted"), watch.phase("tree"), watch.phase("head"):
        raise ValueError("planted")
    with watch.phase("verify"):
        pass
    assert watch.seconds == {"target": 0, "head": 1, "tree": 2, "verify": 1, "cache": 0, "host": 2}


def test_drafting_has_no_borders_within_where_a_device_would_wait(waits: list[torch.device]) -> None:
    coarse, fine = PhaseClock(CUDA), PhaseClock(CUDA, fine=True)
    nested(coarse)
    assert set(coarse.seconds) == {"target", "draft", "verify", "cache", "host"}
    few = len(waits)
    nested(fine)
    assert set(fine.seconds) == set(PHASES)
    assert (few, len(waits) - few) == (5, 9)  # 1 to begin with, and 2 a phase


@pytest.mark.parametrize("method", ["tree", "sampled chain", "passed on", "vanilla"])
def test_who_drafts_with_a_head_books_its_forwards(method: str) -> None:
    target = tiny_target("llama")
    draft = random_draft(target)
    proposers: dict[str, Proposer] = {
        "tree": Eagle3(draft, target, TreeShape(3, 3, 8)),
        "sampled chain": SampledChain(draft, target, 2),
        "passed on": PassingOn(Eagle3(draft, target, TreeShape(3, 3, 8))),
        "vanilla": Vanilla(),
    }
    watch = PhaseClock(CPU)
    loop = DecodingLoop(target, proposers[method], clock=watch)
    loop.submit(Request((5, 6, 7), PARAMS))
    results = [event.result for _ in iter(lambda: loop.pending, 0) for event in loop.step()]
    split = results[-1].split if results[-1] else {}
    assert all(split[phase] > 0 for phase in PHASES if phase != "head")
    assert (split["head"] > 0) == (method != "vanilla")
