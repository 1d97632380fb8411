"""Requests that are aborted or fail by themselves end alone: no other token changes, and no slot is lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tercel.chat import Question
from tercel.decode import streaming
from tercel.decode.eagle3 import Eagle3
from tercel.decode.engine import Engine
from tercel.decode.loop import DecodingLoop
from tercel.decode.proposer import Proposer
from tercel.decode.responder import EngineResponder
from tercel.decode.rules import TokenRules
from tercel.decode.sampled_chain import SampledChain
from tercel.decode.sampling import SamplingParams
from tercel.decode.types import Event, GenerationResult, Request
from tercel.decode.vanilla import Vanilla
from tercel.draft.shape import TreeShape
from tercel.errors import TercelError
from tercel.target_model.output import TargetOutput
from tercel.target_model.protocol import TargetModel
from tests.decode.drafts import Oracle, random_draft, tiny_target

PROMPTS = [tuple(range(5, 5 + n)) for n in (5, 6, 9, 3, 14)]
NEW = 14
SLOTS = 3
Make = Callable[[Any], Proposer]


def vanilla(target) -> Proposer:
    return Vanilla()


def tree(target) -> Proposer:
    return Eagle3(random_draft(target, pruned=False), target, TreeShape(4, 3, 12))


def sampled_chain(target) -> Proposer:
    return SampledChain(random_draft(target, pruned=False), target, 3)


def accepted_paths(target) -> Proposer:
    """Long paths are accepted, so that a failure lies in the middle of a block."""
    answers = {
        request.prompt: result.tokens
        for request, result in zip(asked(), run(target, Vanilla(), asked())[0], strict=True)
    }
    return Oracle(answers)


WAYS = [(vanilla, 0.0), (tree, 0.0), (tree, 1.0), (sampled_chain, 1.0), (accepted_paths, 0.0)]
ALL_WAYS = pytest.mark.parametrize(("make", "temperature"), WAYS)


def asked(temperature: float = 0.0, **params: Any) -> list[Request]:
    return [
        Request(p, SamplingParams(max_new_tokens=NEW, ignore_eos=True, temperature=temperature, seed=40 + i, **params))
        for i, p in enumerate(PROMPTS)
    ]


def run(target, proposer: Proposer, requests: Sequence[Request], slots: int = SLOTS):
    """Results and events of all requests; every event but a request's last has no result."""
    events: dict[int, list[Event]] = {index: [] for index in range(len(requests))}
    for event in Engine(target, proposer, slots=slots).stream(requests):
        events[event.index].append(event)
    return [check(mine) for mine in events.values()], events


def check(events: Sequence[Event]) -> GenerationResult:
    result = events[-1].result
    assert result is not None
    assert all(event.result is None for event in events[:-1])
    assert tuple(token for event in events for token in event.emission.tokens) == result.tokens
    assert "".join(event.emission.text for event in events) == result.text
    assert events[-1].emission.finish_reason == result.finish_reason
    assert (result.finish_reason == "error") == (result.error is not None)
    return result


class Poisoned:
    """A target whose logits are NaN after certain tokens."""

    def __init__(self, target: TargetModel, *tokens: int) -> None:
        self._target, self._tokens = target, torch.tensor(tokens)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def _spoil(self, out: TargetOutput, tokens: torch.Tensor) -> TargetOutput:
        return replace(out, hidden=out.hidden.masked_fill(torch.isin(tokens, self._tokens)[..., None], float("nan")))

    def forward(self, tokens, *args, **kwargs) -> TargetOutput:
        return self._spoil(self._target.forward(tokens, *args, **kwargs), tokens)

    def prefill_chunk(self, remaining, *args, **kwargs) -> list[TargetOutput]:
        outs = self._target.prefill_chunk(remaining, *args, **kwargs)
        return [
            self._spoil(out, torch.tensor([text[: out.hidden.shape[1]]]))
            for out, text in zip(outs, remaining, strict=False)
        ]


class Raises(TokenRules):
    """A processor of somebody's own that breaks off in the middle of an answer."""

    def restrict(self, scores, history, ends, max_new_tokens):
        if history.position >= 4:
            raise KeyError("a table without this token")
        return scores


@ALL_WAYS
def test_a_row_of_nan_ends_alone(make: Make, temperature: float):
    target = tiny_target("llama")
    requests = asked(temperature)
    clean, _ = run(target, make(target), requests)
    used = {token for result in clean for token in result.tokens} | {token for p in PROMPTS for token in p}
    others = {token for i, result in enumerate(clean) if i != 2 for token in result.tokens} | set(PROMPTS[4])
    at, late = next((i, t) for i, t in enumerate(clean[2].tokens) if i > 2 and t not in others)
    early = next(token for token in range(5, target.vocab_size) if token not in used)
    requests.insert(1, replace(requests[0], prompt=(7, 8, early)))
    results, _ = run(Poisoned(target, early, late), make(target), requests)
    bad = [results.pop(1), results.pop(2)]
    assert [result.finish_reason for result in bad] == ["error", "error"]
    for result in bad:
        assert isinstance(result.error, TercelError)
        assert "load the target in bfloat16 or float32" in str(result.error)
    assert (bad[0].tokens, bad[0].steps) == ((), 0)
    assert bad[1].tokens == clean[2].tokens[: len(bad[1].tokens)]
    # where it ends token by token; of drawn drafts the last block is lost
    assert at - 2 <= len(bad[1].tokens) <= at + 1 if make is sampled_chain else len(bad[1].tokens) == at + 1
    assert [result.tokens for result in results] == [clean[i].tokens for i in (0, 1, 3, 4)]


@ALL_WAYS
def test_a_processor_that_raises_ends_its_row_alone(make: Make, temperature: float):
    target = tiny_target("llama")
    requests = asked(temperature)
    clean, _ = run(target, make(target), requests)
    for i in (0, 3):
        requests[i] = replace(requests[i], params=replace(requests[i].params, rules=Raises()))
    results, _ = run(target, make(target), requests)
    for i, (ours, theirs) in enumerate(zip(results, clean, strict=True)):
        if i in (0, 3):
            assert isinstance(ours.error, KeyError)
            assert 1 <= len(ours.tokens) <= 4 if make is sampled_chain else len(ours.tokens) == 4
            assert ours.tokens == theirs.tokens[: len(ours.tokens)]
        else:
            assert (ours.tokens, ours.finish_reason, ours.error) == (theirs.tokens, "length", None)


@pytest.mark.parametrize("drafted", [NEW, 3])
def test_a_wrong_draft_of_nan_changes_no_text(drafted: int):
    """It reaches all nodes, whatever the mask. With 3 the row is soon without drafts, and beside longer ones: what
    stayed in the cache after its tokens would be met again."""
    target = tiny_target("llama")
    clean, _ = run(target, Vanilla(), asked(), len(PROMPTS))
    answers = {p: result.tokens if drafted == NEW else () for p, result in zip(PROMPTS, clean, strict=True)}
    proposer = Oracle({**answers, PROMPTS[0]: clean[0].tokens[:drafted]})
    wrong = (clean[0].tokens[2] + 1) % 100  # drafted beside that token
    assert all(wrong not in (*result.tokens, *prompt) for result, prompt in zip(clean, PROMPTS, strict=True))
    spoiled = []

    def spoil(_: object, inputs: Any, out: torch.Tensor) -> torch.Tensor:
        spoiled.append(bool((inputs[0] == wrong).any()))
        return out.masked_fill((inputs[0] == wrong)[..., None], float("nan"))

    target.model.get_input_embeddings().register_forward_hook(spoil)
    results, _ = run(target, proposer, asked(), len(PROMPTS))
    assert any(spoiled)
    assert [(result.tokens, result.error) for result in results] == [(result.tokens, None) for result in clean]


def test_a_tokenizer_that_fails_over_one_text_ends_that_row_alone(monkeypatch):
    target = tiny_target("llama")
    clean, _ = run(target, Vanilla(), asked())
    word = clean[1].tokens[5]
    assert all(word not in result.tokens for i, result in enumerate(clean) if i != 1)
    decode = type(target.tokenizer).decode

    def fails(self, tokens, **kwargs):
        if word in tokens:
            raise UnicodeError("no such piece")
        return decode(self, tokens, **kwargs)

    monkeypatch.setattr(type(target.tokenizer), "decode", fails)
    results, _ = run(target, Vanilla(), asked())
    assert isinstance(results[1].error, TercelError)
    assert "no such piece" in str(results[1].error)
    assert results[1].tokens == clean[1].tokens[: clean[1].tokens.index(word) + 1]
    assert [r.text for i, r in enumerate(results) if i != 1] == [r.text for i, r in enumerate(clean) if i != 1]


def test_generate_raises_what_ended_a_request():
    target = tiny_target("llama")
    first = run(target, Vanilla(), asked())[0][0].tokens[0]
    with pytest.raises(TercelError, match="load the target in bfloat16 or float32"):
        Engine(Poisoned(target, first), Vanilla()).generate(asked())
    broken = [replace(request, params=replace(request.params, rules=Raises())) for request in asked()]
    with pytest.raises(KeyError, match="a table without this token"):
        Engine(target, Vanilla()).generate(broken)


def test_a_responder_refuses_the_prompt_that_failed_and_goes_on():
    target = tiny_target("llama")
    clean, _ = run(target, Vanilla(), asked())
    early = next(t for t in range(30, 128) if all(t not in result.tokens for result in clean))
    engine = Engine(Poisoned(target, early), Vanilla(), slots=SLOTS)
    responder = EngineResponder(engine, SamplingParams(max_new_tokens=NEW, ignore_eos=True))
    for i, prompt in enumerate((*PROMPTS[:2], (7, early))):
        responder.submit(str(i), Question((), None, tuple(prompt)))
    answers = {}
    while responder.pending():
        answers |= {answer.key: answer for answer in responder.poll()}
    assert answers["2"].finish.startswith("error:the target's largest logit")
    assert [answers[key].token_ids for key in "01"] == [result.tokens for result in clean[:2]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_head_that_overflows_for_a_row_leaves_it_without_drafts(temperature: float, monkeypatch):
    target = tiny_target("llama")
    proposer = sampled_chain(target)
    requests = asked(temperature)[:3]
    clean, _ = run(target, proposer, requests)
    head = proposer.draft.head
    logits = type(head).logits

    def overflowing(output):  # for as long as all three are there, so that the second is the second
        values = logits(head, output)
        return values.index_fill(0, torch.tensor([1]), float("nan")) if len(values) == 3 else values

    monkeypatch.setattr(head, "logits", overflowing)
    results, _ = run(target, proposer, requests)
    assert results[1].nodes < clean[1].nodes
    assert len(results[1].tokens) == NEW
    assert [results[i].tokens for i in (0, 2)] == [clean[i].tokens for i in (0, 2)]
    if not temperature:
        assert results[1].tokens == clean[1].tokens


@ALL_WAYS
@pytest.mark.parametrize("chunk", [None, 4])
def test_aborted_requests_leave_from_wherever_they_are(make: Make, temperature: float, chunk: int | None):
    target = tiny_target("llama")
    requests = asked(temperature)
    clean, _ = run(target, make(target), requests)
    requests.append(Request(tuple(range(20, 60)), requests[0].params))  # waits, and is never run
    loop = DecodingLoop(target, make(target), SLOTS, chunk)
    for request in requests:
        loop.submit(request)
    events: dict[int, list[Event]] = {index: [] for index in range(len(requests))}

    def step() -> list[Event]:
        new = loop.step()
        for event in new:
            events[event.index].append(event)
        return new

    assert loop.abort(5)
    step()
    while not events[1]:  # two rows run, a third may be on its way
        step()
    assert loop.abort(1)
    assert loop.abort(2)
    assert {event.index for event in step() if event.result is not None} >= {1, 2}
    first = "abort" if loop.abort(0) else "length"  # which accepted drafts may have ended by now
    while loop.pending:
        step()
    results = [check(mine) for mine in events.values()]
    assert [result.finish_reason for result in results] == [first, "abort", "abort", "length", "length", "abort"]
    assert [result.tokens for result in results[3:]] == [clean[3].tokens, clean[4].tokens, ()]
    for ours, theirs in zip(results[:3], clean, strict=False):
        assert ours.tokens == theirs.tokens[: len(ours.tokens)]
    assert results[1].tokens
    assert not loop.abort(1)
    assert not loop.abort(99)


def test_an_aborted_slot_is_free_in_the_same_step():
    target = tiny_target("bloom")
    loop = DecodingLoop(target, Vanilla(), slots=1)
    for request in asked()[:2]:
        loop.submit(request)
    loop.step()
    loop.abort(0)
    assert [(event.index, event.emission.finish_reason) for event in loop.step()] == [
        (0, "abort"),
        (1, None),
        (1, None),
    ]


def test_text_held_back_for_a_stop_string_is_given_out_with_an_abort():
    target = tiny_target("llama")
    clean, _ = run(target, Vanilla(), asked())
    text = clean[0].text
    requests = [replace(r, params=replace(r.params, stop=(text[:4] + "\x00",))) for r in asked()[:1]]
    loop = DecodingLoop(target, Vanilla())
    loop.submit(requests[0])
    events = loop.step()
    loop.abort(0)
    result = check([*events, *loop.step()])
    assert result.text == target.tokenizer.decode(result.tokens, skip_special_tokens=True)


def test_text_is_made_where_it_is_wanted_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target("llama")
    told = Engine(target, Vanilla()).generate(asked())
    assert all(result.text for result in told)
    monkeypatch.setattr(streaming, "detokenize", None)
    quiet = Engine(target, Vanilla()).generate([replace(request, text=False) for request in asked()])
    assert [(result.tokens, result.text) for result in quiet] == [(result.tokens, "") for result in told]
