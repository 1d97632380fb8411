"""What holds for every method (EAGLE-3's tests stand elsewhere): it changes no text, whatever the model, the batch and
the way in which rows come and go."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from tercel.decode.costs import StepCosts
from tercel.decode.engine import Engine
from tercel.decode.loop import DecodingLoop
from tercel.decode.proposer import Proposer
from tercel.decode.proposers import (
    EAGLE,
    EAGLE2,
    HYDRA,
    LOOKAHEAD,
    MEDUSA,
    MTP,
    ORACLE,
    P_EAGLE,
    PLD,
    SPS,
    SUFFIX,
    make_proposer,
    proposer_kind,
)
from tercel.decode.sampling import SamplingParams
from tercel.decode.types import Request
from tercel.decode.vanilla import Vanilla
from tercel.draft.shape import TreeShape
from tercel.target_model.capabilities import TreeSupport
from tercel.target_model.model import Target
from tests.decode.drafts import tiny_target
from tests.methods.heads import random_head_of
from tests.methods.mtp_worlds import random_mtp

METHODS = (PLD, SUFFIX, LOOKAHEAD, SPS, ORACLE, EAGLE, EAGLE2, MEDUSA, HYDRA, MTP, P_EAGLE)
CHAIN, TREE = TreeShape.chain(4), TreeShape(3, 4, 9)
# the second has a window of 8 tokens
WAYS = (("llama", None, 2), ("gemma3", TREE, 3), ("gpt_neox", CHAIN, 1), ("mixtral", TREE, 2))
CHEAP = StepCosts({1: {1: 1.0, 64: 1.1}})
PROMPTS = [(9, 10, 9, 9, 10, 9), (5, 6, 7), tuple(range(20, 50)), (8,), (11, 12) * 6]
NEW = (16, 7, 12, 20, 1)  # rows leave at different times, one with its first token
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, repetition_penalty=1.05, seed=4, ignore_eos=True)
GREEDY = SamplingParams(ignore_eos=True)
Texts = list[tuple[int, ...]]


@cache
def target_of(arch: str) -> Target:
    return tiny_target(arch, num_hidden_layers=2)


@cache
def second_model() -> Target:
    return tiny_target("qwen3", seed=1, num_hidden_layers=1)


def asked(params: SamplingParams) -> list[Request]:
    return [Request(prompt, replace(params, max_new_tokens=n)) for prompt, n in zip(PROMPTS, NEW, strict=True)]


def make(name: str, target: Target, shape: TreeShape | None) -> Proposer:
    """Without a shape, one whose drafts are cut to what pays."""
    head = random_mtp(target) if name == MTP else random_head_of(name, target)
    return make_proposer(name, target, head=head, model=second_model(), shape=shape, costs=CHEAP)


def texts(target: Target, proposer: Proposer, params: SamplingParams, slots: int = 2) -> Texts:
    return [result.tokens for result in Engine(target, proposer, slots=slots).generate(asked(params))]


@cache
def truth(arch: str, params_of: str) -> Texts:
    return texts(target_of(arch), Vanilla(), {"greedy": GREEDY, "sampled": SAMPLED}[params_of])


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(("arch", "shape", "slots"), WAYS, ids=lambda value: str(value))
def test_greedy_text_is_the_same(name: str, arch: str, shape: TreeShape | None, slots: int) -> None:
    target = target_of(arch)
    assert texts(target, make(name, target, shape), GREEDY, slots) == truth(arch, "greedy")


@pytest.mark.parametrize("name", [name for name in METHODS if not proposer_kind(name).draws])
def test_the_same_seed_gives_the_same_text(name: str) -> None:
    target = target_of("llama")
    for shape, slots in ((TREE, 3), (None, 2)):
        assert texts(target, make(name, target, shape), SAMPLED, slots) == truth("llama", "sampled")


@pytest.mark.parametrize("name", METHODS)
def test_rows_that_are_aborted_leave_the_others_as_they_were(name: str) -> None:
    target = target_of("llama")
    loop = DecodingLoop(target, make(name, target, TREE), slots=3, prefill_chunk=10)
    indices = [loop.submit(request) for request in asked(GREEDY)]
    found, gone = {}, False
    while loop.pending:
        for event in loop.step():
            if event.result is not None:
                found[event.index] = event.result
            elif event.index == indices[2] and not gone:  # it has just begun, between others
                gone = loop.abort(event.index)
    results = [found[index] for index in indices]
    assert gone
    assert results[2].finish_reason == "abort"
    assert 0 < len(results[2].tokens) < NEW[2]
    for result, text in zip(results, truth("llama", "greedy"), strict=True):
        assert result.tokens == text[: len(result.tokens)]
    assert [len(results[i].tokens) for i in (0, 1, 3, 4)] == [NEW[i] for i in (0, 1, 3, 4)]


@pytest.mark.parametrize("name", [name for name in METHODS if name != LOOKAHEAD])
def test_a_target_that_takes_no_trees_gets_chains(name: str) -> None:
    target = tiny_target("llama", num_hidden_layers=2)
    target.tree_support = TreeSupport(False, True, "its attention ignores the tree mask")
    for shape in (CHAIN, None):
        proposer = make(name, target, shape)
        assert not proposer.needs_tree
        assert texts(target, proposer, GREEDY) == truth("llama", "greedy")


@pytest.mark.parametrize("name", METHODS)
def test_an_answer_may_fill_the_context(name: str) -> None:
    target = target_of("llama")
    room = 5
    prompt = tuple(5 + i % 7 for i in range(target.context_length - room))
    result = Engine(target, make(name, target, TREE)).generate([Request(prompt, GREEDY)])[0]
    assert result.tokens == Engine(target, Vanilla()).generate([Request(prompt, GREEDY)])[0].tokens
    assert (len(result.tokens), result.finish_reason) == (room, "length")
