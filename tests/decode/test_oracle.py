"""The oracle: right as often as is asked for, and never the reason of another text."""

from __future__ import annotations

import pytest

from tercel.decode.engine import Engine
from tercel.decode.oracle import Oracle
from tercel.decode.sampling import SamplingParams
from tercel.decode.types import Request
from tercel.decode.vanilla import Vanilla
from tercel.draft.shape import TreeShape
from tercel.errors import TercelError
from tests.decode.drafts import tiny_target

PROMPTS = ((5, 6, 7), (30, 31), (40, 41, 42, 43))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("shape", [TreeShape.chain(4), TreeShape(3, 4, 12)], ids=str)
def test_it_is_right_as_often_as_is_asked_for(shape: TreeShape, temperature: float) -> None:
    target = tiny_target("llama", num_hidden_layers=2)
    params = SamplingParams(max_new_tokens=60, ignore_eos=True, temperature=temperature, seed=5)
    asked = [Request(prompt, params) for prompt in PROMPTS]
    truth = [result.tokens for result in Engine(target, Vanilla(), slots=3).generate(asked)]
    for rate in (0.0, 0.7, 1.0):
        results = Engine(target, Oracle(target, shape, rate), slots=2).generate(asked)
        assert [result.tokens for result in results] == truth
        whole = [accepted for result in results for accepted in result.accepted[:-1]]
        first = sum(accepted > 0 for accepted in whole) / len(whole)
        assert first == pytest.approx(rate, abs=0.0 if rate in (0, 1) else 0.15)
        assert rate < 1 or set(whole) == {4}
        assert {result.nodes / result.steps > shape.nodes - 1.5 for result in results} == {True}


def test_it_may_know_the_answers_before() -> None:
    target = tiny_target("llama", num_hidden_layers=2)
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    asked = [Request(prompt, params) for prompt in PROMPTS]
    truth = [result.tokens for result in Engine(target, Vanilla(), slots=3).generate(asked)]
    rehearsed = Oracle(target)
    rehearsed.rehearse(asked)
    wrong = {PROMPTS[0]: truth[1]}
    known = Oracle(target, answers=dict(zip(PROMPTS, truth, strict=True)))
    for oracle in (rehearsed, known):
        again: list[object] = []
        oracle.rehearse = again.append
        results = Engine(target, oracle, slots=3).generate(asked)
        assert [result.tokens for result in results] == truth
        assert results[0].accepted[0] == 4
        assert not again  # nothing was decoded twice
    assert Engine(target, Oracle(target, answers=wrong)).generate(asked[:1])[0].tokens == truth[0]


def test_a_rate_that_is_none() -> None:
    with pytest.raises(TercelError, match="between 0 and 1, not 2"):
        Oracle(tiny_target("llama", num_hidden_layers=2), rate=2)
