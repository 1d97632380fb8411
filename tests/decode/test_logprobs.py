"""Logprobs are the target's own, with drafts as without."""

from __future__ import annotations

import pytest
import torch

from tercel.decode import loop
from tercel.decode.engine import Engine
from tercel.decode.sampling import SamplingParams
from tercel.decode.types import Request
from tercel.decode.vanilla import Vanilla
from tests.decode.drafts import Oracle, tiny_target

PROMPTS = [tuple(range(5, 5 + n)) for n in (5, 90, 3)]


def told(target, proposer, slots=1, **params):
    """Of each request its events, together: tokens, their logprobs, and those of the prompt."""
    given = SamplingParams(**{"max_new_tokens": 12, "seed": 3, "ignore_eos": True, **params})
    requests = [Request(prompt, given, logprobs=4, echo=True) for prompt in PROMPTS]
    found = [([], [], []) for _ in requests]
    for event in Engine(target, proposer, slots=slots).stream(requests):
        for part, more in zip(
            found[event.index], (event.emission.tokens, event.logprobs, event.prompt_logprobs), strict=True
        ):
            part.extend(more)
    return found


def test_logprobs_are_those_of_a_whole_forward_however_tokens_come():
    target = tiny_target("llama", num_hidden_layers=2)
    plain = told(target, Vanilla(), repetition_penalty=1.3)  # which leaves them as they are
    answers = {prompt: tuple(tokens) for prompt, (tokens, _, _) in zip(PROMPTS, plain, strict=True)}
    drafted = told(target, Oracle(answers), slots=3, repetition_penalty=1.3)
    assert [tokens for tokens, _, _ in drafted] == [tokens for tokens, _, _ in plain]
    for prompt, (tokens, logprobs, before) in zip(PROMPTS * 2, plain + drafted, strict=True):
        whole = [*prompt, *tokens]
        with torch.no_grad():
            scores = target.model(input_ids=torch.tensor([whole])).logits[0].double().log_softmax(-1)
        truth = [float(scores[place, token]) for place, token in enumerate(whole[1:])]
        entries = [*before, *logprobs]
        assert [entry.token for entry in entries] == whole[1:]
        torch.testing.assert_close([entry.logprob for entry in entries], truth, atol=1e-4, rtol=0)
        for entry, row in zip(entries, scores, strict=False):
            values = [value for _, value in entry.likeliest]
            assert len(values) == 4
            assert values == sorted(values, reverse=True)
            assert entry.likeliest[0][0] == int(row.argmax())


def test_an_answer_that_ends_within_a_block_has_no_more_of_them_than_tokens():
    target = tiny_target("llama", num_hidden_layers=2)
    tokens, _, _ = told(target, Vanilla())[0]
    oracle = Oracle({prompt: tuple(tokens) for prompt in PROMPTS})
    requests = [Request(PROMPTS[0], SamplingParams(max_new_tokens=3, ignore_eos=True), logprobs=0)]
    events = list(Engine(target, oracle).stream(requests))
    assert [len(event.logprobs) for event in events] == [len(event.emission.tokens) for event in events]
    assert sum(event.nodes for event in events) == events[-1].result.nodes
    assert events[-1].drafted >= 1
    assert all(entry.likeliest == () for event in events for entry in event.logprobs)


@pytest.mark.parametrize("good", [0, 1, 2])
def test_a_stream_that_fails_over_them_has_what_its_answer_has(good: int, monkeypatch: pytest.MonkeyPatch):
    """Whenever that is: at the prompt, or at a block of drafts."""
    target = tiny_target("llama", num_hidden_layers=2)
    tokens, _, _ = told(target, Vanilla())[0]
    calls, own = [], loop.token_logprobs

    def fails(*of):
        calls.append(of)
        if len(calls) > good:
            raise RuntimeError("no likelihood")
        return own(*of)

    monkeypatch.setattr(loop, "token_logprobs", fails)
    requests = [Request(PROMPTS[0], SamplingParams(max_new_tokens=12, ignore_eos=True), logprobs=2)]
    events = list(Engine(target, Oracle({PROMPTS[0]: tuple(tokens)})).stream(requests))
    result = events[-1].result
    assert (result.finish_reason, str(result.error)) == ("error", "no likelihood")
    given = tuple(token for event in events for token in event.emission.tokens)
    assert given == result.tokens == tuple(tokens[: len(given)])
    assert "".join(event.emission.text for event in events) == result.text
    assert [entry.token for event in events for entry in event.logprobs] == list(given)
    assert (len(given) > 2) == (good == 2)
