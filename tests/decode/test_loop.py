"""The loop is lossless: whatever is proposed, for every architecture, one row or many, greedy or sampled."""

from __future__ import annotations

import pytest
import torch

from tercel.chat import panics
from tercel.decode.clock import PHASES
from tercel.decode.eagle3 import Eagle3
from tercel.decode.engine import Engine
from tercel.decode.loop import DecodingLoop
from tercel.decode.rules import TokenRules
from tercel.decode.sampled_chain import SampledChain
from tercel.decode.sampling import SamplingParams
from tercel.decode.types import Request
from tercel.decode.vanilla import Vanilla
from tercel.draft.shape import TreeShape
from tercel.errors import TercelError
from tests.decode.drafts import Oracle, random_draft, tiny_target
from tests.tiny import ARCHS

EVERY_RULE = TokenRules(
    sequence_bias=(((30,), 4.0), ((30, 31), 9.0), ((31, 30), 9.0)),
    no_repeat_ngram_size=2,
    bad_words_ids=((9,), (30, 30)),
    min_new_tokens=12,
    forced_eos_token_id=(40,),
    exponential_decay_length_penalty=(8, 1.2),
    suppress_tokens=(50, 51),
    begin_suppress_tokens=(30,),
    eos_token_ids=(32, 33),
)
PROMPTS = [tuple(range(5, 5 + n)) for n in (5, 12, 3, 30, 8)]


def requests(**params) -> list[Request]:
    base = {"max_new_tokens": 24, "seed": 3, "ignore_eos": True}
    return [Request(prompt, SamplingParams(**{**base, **params})) for prompt in PROMPTS]


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
    oracle = Oracle(answers)
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
        {"temperature": 1.0, "rules": EVERY_RULE},
        {"rules": EVERY_RULE},
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
    # an untrained head is nearly always wrong: the oracle knows the text of this seed, with decoys around it
    results = Engine(target, Oracle(dict(zip(PROMPTS, truth, strict=True))), slots=3).generate(asked)
    assert [result.tokens for result in results] == truth
    assert min(result.tau for result in results) > 3.5


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
    oracle = Oracle(answers)
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
    oracle = Oracle(answers)
    events = list(Engine(target, oracle, slots=2).stream(requests()))
    for index, answer in enumerate(truth):
        mine = [event for event in events if event.index == index]
        assert tuple(token for event in mine for token in event.emission.tokens) == answer
        result = mine[-1].result
        assert result is not None
        assert all(event.result is None for event in mine[:-1])
        assert "".join(event.emission.text for event in mine) == result.text
        assert sum(event.drafted for event in mine) == sum(result.accepted)
        assert set(result.split) == set(PHASES)


def test_refuses_what_cannot_be_decoded():
    target = tiny_target("llama")
    engine = Engine(target, Vanilla())
    with pytest.raises(TercelError, match="empty"):
        engine.generate([Request(())])
    with pytest.raises(TercelError, match="shorten"):
        engine.generate([Request(tuple(range(5, 105)) * 3)])
    with pytest.raises(TercelError, match="vocabulary"):
        engine.generate([Request((5, 100_000))])


@pytest.mark.parametrize(("limit", "temperature", "length"), [(32, 0.0, 100), (7, 1.0, 12), (1, 0.0, 4)])
def test_a_head_drafts_as_far_as_it_has_positions(limit, temperature, length):
    target = tiny_target("llama")
    asked = requests(max_new_tokens=length, temperature=temperature)[1:4]  # prompts of 12, 3 and 30 tokens
    truth = texts(target, Vanilla(), asked)
    draft = random_draft(target, pruned=False, max_position_embeddings=limit)
    for proposer in (Eagle3(draft, target, TreeShape(3, 4, 8)), Eagle3(draft, target, TreeShape.chain(3))):
        seen = _watch_positions(proposer)
        results = Engine(target, proposer, slots=3).generate(asked)
        assert [result.tokens for result in results] == truth
        assert proposer.limited
        assert max(seen) <= limit - 1
        # steps of one node: all that lie past the limit, and no other
        for request, result in zip(asked, results, strict=True):
            lengths = len(request.prompt) + 1 + torch.tensor([0, *(a + 1 for a in result.accepted)]).cumsum(0)[:-1]
            drafted = int((lengths <= limit + 1).sum())
            assert (result.nodes > result.steps) == (drafted > 0)
            assert sum(result.accepted[drafted:]) == 0


def test_a_head_with_room_is_not_limited():
    target = tiny_target("llama")
    proposer = Eagle3(random_draft(target, pruned=False), target, TreeShape(3, 4, 8))
    texts(target, proposer, requests(max_new_tokens=8)[:1])
    assert not proposer.limited


def test_a_sampled_chain_stops_drafting_where_its_positions_end():
    target = tiny_target("llama")
    draft = random_draft(target, pruned=False, max_position_embeddings=32)
    asked = requests(max_new_tokens=25)[1:4]
    chain = SampledChain(draft, target, 3)
    seen = _watch_positions(chain)
    assert texts(target, chain, asked, slots=2) == texts(target, Vanilla(), asked)
    assert chain.limited
    assert max(seen) <= 31
    drawn = Engine(target, chain, slots=2).generate(requests(max_new_tokens=25, temperature=1.0)[1:3])
    assert [len(result.tokens) for result in drawn] == [25] * 2


def _watch_positions(proposer) -> list[int]:
    """The positions that the head is asked about."""
    seen, head = [0], proposer.draft.head
    project = type(head).project

    def watched(embedding, hidden, positions):
        seen.append(int(positions.max()))
        return project(head, embedding, hidden, positions)

    head.project = watched
    return seen


def test_texts_of_a_step_are_guarded_together(monkeypatch):
    """Not every piece of every row's text opens a file of its own for what a panic would say."""
    opened, stepped = [], []
    make, advance = panics._scratch_file, DecodingLoop._advance
    monkeypatch.setattr(panics, "_scratch_file", lambda: opened.append(1) or make())
    monkeypatch.setattr(DecodingLoop, "_advance", lambda loop: stepped.append(1) or advance(loop))
    results = Engine(tiny_target("llama"), Vanilla(), slots=5).generate(requests())
    assert all(result.text for result in results)
    assert len(opened) < 2 * len(stepped)  # of 120 tokens; the first of each comes outside of any step
