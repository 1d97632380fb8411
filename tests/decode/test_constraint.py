"""A request's own constraint is asked for every path of the tree, and changes nothing that it allows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tercel.decode.eagle3 import Eagle3
from tercel.decode.engine import Engine
from tercel.decode.sampled_chain import SampledChain
from tercel.decode.sampling import SamplingParams
from tercel.decode.types import Request
from tercel.decode.vanilla import Vanilla
from tercel.draft.shape import TreeShape
from tests.decode.drafts import Oracle, random_draft, tiny_target
from tests.tiny import VOCAB

PROMPTS = [tuple(range(5, 5 + n)) for n in (5, 12, 3)]


class OddAndEven:
    """Odd tokens after even ones and the other way round; odd first. told: how often it was asked."""

    asked = 0

    def __init__(self) -> None:
        self.path: list[int] = []

    def push(self, token: int) -> None:
        assert self.allowed_after(self.path)[token]
        self.path.append(token)

    def pop(self, count: int) -> None:
        del self.path[len(self.path) - count :]

    def allowed(self) -> torch.Tensor:
        OddAndEven.asked += 1
        return self.allowed_after(self.path)

    @staticmethod
    def allowed_after(path: list[int]) -> torch.Tensor:
        odd = not path or path[-1] % 2 == 0
        return torch.arange(VOCAB) % 2 == int(odd)


def requests(**params) -> list[Request]:
    given = SamplingParams(**{"max_new_tokens": 16, "seed": 3, "ignore_eos": True, **params})
    return [Request(prompt, given, constraint=OddAndEven) for prompt in PROMPTS]


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9, "top_k": 9}])
def test_constrained_text_is_the_same_with_drafts(params):
    target = tiny_target("llama", num_hidden_layers=3)
    asked = requests(**params)
    truth = [result.tokens for result in Engine(target, Vanilla()).generate(asked)]
    assert all([token % 2 for token in tokens] == [1, 0] * 8 for tokens in truth)
    drafting = Eagle3(random_draft(target), target, TreeShape(3, 3, 9))
    assert [result.tokens for result in Engine(target, drafting, slots=3).generate(asked)] == truth
    oracle = Oracle(dict(zip(PROMPTS, truth, strict=True)))
    results = Engine(target, oracle, slots=2).generate(asked)
    assert [result.tokens for result in results] == truth
    assert min(result.tau for result in results) > 2.5  # it speculates all the same


def test_only_the_rows_that_have_one_are_constrained():
    target = tiny_target("llama", num_hidden_layers=3)
    asked = requests()
    mixed = [asked[0], replace(asked[1], constraint=None), asked[2]]
    truth = [Engine(target, Vanilla()).generate([request])[0].tokens for request in mixed]
    assert [result.tokens for result in Engine(target, Vanilla(), slots=3).generate(mixed)] == truth
    assert any(token % 2 == 0 for token in truth[1][::2])


def test_drafts_that_were_drawn_are_held_to_it_too():
    target = tiny_target("llama", num_hidden_layers=3)
    proposer = SampledChain(random_draft(target), target, 3)
    results = Engine(target, proposer, slots=2).generate(requests(temperature=1.0))
    assert all([token % 2 for token in result.tokens] == [1, 0] * 8 for result in results)


def test_one_that_forbids_everything_ends_its_own_row_alone():
    class Nothing(OddAndEven):
        def allowed(self) -> torch.Tensor:
            return torch.arange(VOCAB) < (VOCAB if len(self.path) < 3 else 0)

        def push(self, token: int) -> None:
            self.path.append(token)

    target = tiny_target("llama", num_hidden_layers=3)
    asked = [replace(requests()[0], constraint=Nothing), replace(requests()[1], constraint=None)]
    ended = [event.result for event in Engine(target, Vanilla(), slots=2).stream(asked) if event.result is not None]
    failed, fine = sorted(ended, key=lambda result: result.finish_reason)
    assert failed.finish_reason == "error"
    assert "no token is left" in str(failed.error)
    assert fine.finish_reason == "length"
