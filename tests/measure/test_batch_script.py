"""`bench/batch.py`: a steady batch, in pairs of windows, and the check of its texts."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tercel.decode.eagle3 import Eagle3
from tercel.decode.proposers import EAGLE3, VANILLA
from tercel.decode.vanilla import Vanilla
from tercel.draft.shape import TreeShape
from tests.decode.drafts import random_draft, tiny_target

PROMPTS = [tuple(range(5, 5 + n)) for n in (5, 9, 30, 3, 14)]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("batch_script", Path(__file__).parents[2] / "bench" / "batch.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


def test_a_steady_batch_is_measured_in_pairs_of_windows(script, monkeypatch):
    target = tiny_target("llama")
    draft, seen = random_draft(target), []
    step = script.DecodingLoop.step

    def watched(loop):
        seen.append((loop.pending, loop.slots))
        return step(loop)

    monkeypatch.setattr(script.DecodingLoop, "step", watched)
    plan = script.Plan(pairs=3, window=6, row_window=4, new=12)
    made = {VANILLA: Vanilla, EAGLE3: lambda: Eagle3(draft, target, TreeShape(2, 2, 4))}
    found = script.measure(target, lambda name: made[name](), PROMPTS, 3, plan)
    assert all(pending == slots for pending, slots in seen)
    assert {name: len(windows) for name, windows in found.windows.items()} == {VANILLA: 3, EAGLE3: 3}
    assert all(18 <= tokens < 18 + 3 * 3 for windows in found.windows.values() for tokens, _ in windows)
    entry = found.to_json()
    assert entry["ci95"][0] <= entry["ratio"] <= entry["ci95"][1]
    assert entry["ratio"] == pytest.approx(entry[EAGLE3] / entry[VANILLA])


def test_texts_of_a_batch_are_compared_with_each_alone(script, monkeypatch):
    target = tiny_target("llama")
    draft = random_draft(target)
    made = {VANILLA: Vanilla, EAGLE3: lambda: Eagle3(draft, target, TreeShape(2, 2, 4))}
    assert script.differing(target, lambda name: made[name](), PROMPTS, 3, 9) == 0
    forward = target.forward
    monkeypatch.setattr(target, "forward", lambda tokens, *rest: forward(tokens.flip(1), *rest))
    assert script.differing(target, lambda name: made[name](), PROMPTS, 3, 9) > 0
