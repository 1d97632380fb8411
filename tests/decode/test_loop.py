"""The loop is lossless: whatever is proposed, for every architecture, one row or many, greedy or sampled."""

from __future__ import annotations

import pytest
import torch

from tercel.decode.eagle3 import Eagle3, SampledChain, TreeShape
from tercel.decode.engine import Engine
from tercel.decode.sampling import SamplingParams
from tercel.decode.types import Request
from tercel.decode.vanilla import Vanilla
from tercel.errors import TercelError
from tests.decode.drafts import Oracle, random_draft, tiny_target
from tests.tiny import ARCHS

PROMPTS = [tuple(range(5, 5 + n)) for n in (5, 12, 3, 30, 8)]


def requests(**params) -> list[Request]:
    base = {"max_new_tokens": 24, "seed": 3, "ignore_eos": True}
    return [Request(prompt, SamplingParams(**{**base, **params})) for prompt in PROMPTS]


def prompt_of(tokens):
    return next(p for p in sorted(PROMPTS, key=len, reverse=True) if tokens[: len(p)] == p)


def texts(target, proposer, asked, slots=1):
    return [result.tokens for result in Engine(target, proposer, slots=slots).generate(asked)]


def reference(target, prompt, steps):
    """Greedy tokens from whole forwards, without cache, loop or mask of ours."""
    tokens = list(prompt)
    for _ in range(steps):
        with torch.no_grad():
            logits = target.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]
        tokens.append(int(logits.argmax()))
    return tuple(tokens[len(prompt) :])


@pytest.mark.parametrize("arch", ARCHS)
def test_greedy_equals_the_stock_model(arch):
    target = tiny_target(arch)
    asked = requests()
    truth = [reference(target, request.prompt, 24) for request in asked]
    assert texts(target, Vanilla(), asked) == truth
    draft = random_draft(target)
    assert texts(target, Eagle3(draft, target, TreeShape(5, 4, 20)), asked) == truth
    assert texts(target, Eagle3(draft, target, TreeShape.chain(3)), asked, slots=3) == truth
    answers = dict(zip(PROMPTS, truth, strict=True))
    oracle = Oracle(answers, prompt_of)
    results = Engine(target, oracle, slots=2).generate(asked)
    assert [result.tokens for result in results] == truth
    assert min(result.tau for result in results) > 3.5  # accepted, not merely tolerated


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
        {"temperature": 1.3, "min_p": 0.05, "repetition_penalty": 1.2},
        {"temperature": 1.0, "frequency_penalty": 0.4, "presence_penalty": 0.3, "logit_bias": {7: 3.0}},
        {"repetition_penalty": 1.5, "frequency_penalty": 0.4},
    ],
)
def test_same_seed_same_text(params):
    target = tiny_target("llama")
    asked = requests(**params)
    truth = texts(target, Vanilla(), asked)
    draft = random_draft(target, pruned=False)
    for slots in (1, 3):
        assert texts(target, Eagle3(draft, target, TreeShape(6, 3, 30)), asked, slots) == truth
        assert texts(target, Eagle3(draft, target, TreeShape.chain(2)), asked, slots) == truth


def test_sampled_chain_is_greedy_at_temperature_zero():
    target = tiny_target("llama")
    draft = random_draft(target)
    assert texts(target, SampledChain(draft, target, 3), requests()) == texts(target, Vanilla(), requests())


@pytest.mark.parametrize("flags", [{"fc_norm": True}, {"norm_output": True}])
def test_eagle31_flags(flags):
    target = tiny_target("qwen3")
    draft = random_draft(target, **flags)
    assert texts(target, Eagle3(draft, target, TreeShape(4, 4, 16)), requests()) == texts(target, Vanilla(), requests())


def test_stops_where_token_by_token_decoding_stops():
    target = tiny_target("llama")
    truth = texts(target, Vanilla(), requests())
    answers = dict(zip(PROMPTS, truth, strict=True))
    oracle = Oracle(answers, prompt_of)
    for stop in range(3, 9):  # every place inside an accepted block
        token = truth[0][stop]
        asked = requests(stop_token_ids=(token,))
        assert texts(target, oracle, asked) == texts(target, Vanilla(), asked)
        asked = requests(max_new_tokens=stop)
        assert texts(target, oracle, asked, slots=2) == [answer[:stop] for answer in truth]


def test_context_limit_ends_the_answer():
    target = tiny_target("llama")
    room = 6
    prompt = tuple(5 + i % 100 for i in range(target.context_length - room))
    params = SamplingParams(max_new_tokens=50, ignore_eos=True)
    draft = random_draft(target)
    results = [
        Engine(target, proposer).generate([Request(prompt, params)])[0]
        for proposer in (Vanilla(), Eagle3(draft, target, TreeShape(4, 4, 16)))
    ]
    assert [len(result.tokens) for result in results] == [room, room]
    assert results[0].tokens == results[1].tokens
    assert results[0].finish_reason == "length"


def test_events_tell_drafted_tokens_and_text():
    target = tiny_target("llama")
    truth = texts(target, Vanilla(), requests())
    answers = dict(zip(PROMPTS, truth, strict=True))
    oracle = Oracle(answers, prompt_of)
    events = list(Engine(target, oracle, slots=2).stream(requests()))
    for index, answer in enumerate(truth):
        mine = [event for event in events if event.index == index]
        assert tuple(token for event in mine for token in event.emission.tokens) == answer
        result = mine[-1].result
        assert result is not None
        assert all(event.result is None for event in mine[:-1])
        assert "".join(event.emission.text for event in mine) == result.text
        assert sum(event.drafted for event in mine) == sum(result.accepted)
        assert set(result.split) == {"draft", "target", "verify", "cache", "host"}


def test_refuses_what_cannot_be_decoded():
    target = tiny_target("llama")
    engine = Engine(target, Vanilla())
    with pytest.raises(TercelError, match="empty"):
        engine.generate([Request(())])
    with pytest.raises(TercelError, match="shorten"):
        engine.generate([Request(tuple(range(5, 105)) * 3)])
    with pytest.raises(TercelError, match="vocabulary"):
        engine.generate([Request((5, 100_000))])
