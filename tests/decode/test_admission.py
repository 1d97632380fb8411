"""Prompts enter the running batch: many at once, in chunks beside rows that decode, without changing any text."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tercel.decode.eagle3 import Eagle3
from tercel.decode.engine import Engine
from tercel.decode.loop import DecodingLoop
from tercel.decode.request import ActiveRequest
from tercel.decode.sampled_chain import SampledChain
from tercel.decode.sampling import SamplingParams
from tercel.decode.types import Request
from tercel.decode.vanilla import Vanilla
from tercel.draft.shape import TreeShape
from tercel.errors import TercelError
from tercel.target_model.prefill import CHUNK, prefill
from tests.decode.drafts import Oracle, random_draft, tiny_target
from tests.target_model.test_rope import longrope

PROMPTS = [tuple(range(5, 5 + n)) for n in (5, 6, 60, 3, 4, 30, 1)]
NEW = (12, 1, 9, 14, 6, 10, 8)  # rows leave at different times, one with its first token


def asked() -> list[Request]:
    return [
        Request(prompt, SamplingParams(max_new_tokens=new, ignore_eos=True))
        for prompt, new in zip(PROMPTS, NEW, strict=True)
    ]


@pytest.mark.parametrize("arch", ["llama", "gemma3", "gpt2", "longrope", "bloom"])
def test_prompts_in_chunks_beside_running_rows_give_the_same_texts(arch):
    target = longrope(40) if arch == "longrope" else tiny_target(arch)
    truth = [result.tokens for result in Engine(target, Vanilla()).generate(asked())]
    proposers = [Vanilla()]
    if target.tree_support.tree:
        draft = random_draft(target)
        answers = dict(zip(PROMPTS, truth, strict=True))
        proposers += [
            Eagle3(draft, target, TreeShape(3, 3, 8)),
            SampledChain(draft, target, 2),
            Oracle(answers),
        ]
    for proposer in proposers:
        for slots, chunk in ((3, 7), (7, 16), (7, None)):
            engine = Engine(target, proposer, slots=slots, prefill_chunk=chunk)
            assert [result.tokens for result in engine.generate(asked())] == truth


def test_a_long_prompt_does_not_hold_up_those_who_decode():
    target = tiny_target("llama")
    loop = DecodingLoop(target, Vanilla(), slots=2, prefill_chunk=10)
    short, long = (loop.submit(request) for request in (asked()[3], asked()[2]))
    by_step = []
    while loop.pending:
        by_step.append([event.index for event in loop.step()])
    first = next(step for step, indices in enumerate(by_step) if long in indices)
    assert first == 1 + 60 // 10 - 1  # the short prompt's own step, then a chunk a step
    assert all(short in indices for indices in by_step[:first])


def test_waiting_prompts_of_like_length_are_run_at_once(monkeypatch):
    target, shapes = tiny_target("llama"), []
    run = target.stock.run

    def watched(tokens, *args, **kwargs):
        shapes.append(tuple(tokens.shape))
        return run(tokens, *args, **kwargs)

    monkeypatch.setattr(target.stock, "run", watched)
    loop = DecodingLoop(target, Eagle3(random_draft(target), target, TreeShape(2, 2, 4)), slots=7)
    for request in asked():
        loop.submit(request)
    loop.step()
    assert shapes == [(2, 6), (1, 60), (2, 4), (1, 30), (1, 1), (6, 4)]


def test_rows_that_enter_together_are_drafted_for_as_if_each_came_alone():
    target = tiny_target("llama")
    draft = random_draft(target)
    together, alone = (Eagle3(draft, target, TreeShape(3, 3, 8)) for _ in range(2))
    rows = [ActiveRequest(i, request, target) for i, request in enumerate(asked())]
    outputs = prefill(target, PROMPTS, target.new_cache(len(PROMPTS), 70), capture=together.feature_layers)
    for row in rows:
        row.start(9)
    together.reset(70)
    together.admit(rows, outputs)
    alone.reset(3)
    for row, output in zip(rows, outputs, strict=True):
        alone.admit([row], [output])
    torch.testing.assert_close(together.state.output, alone.state.output, rtol=1e-4, atol=1e-5)
    trees, others = ([proposal.tree for proposal in proposer.propose(rows)] for proposer in (together, alone))
    assert [tree.token_list for tree in trees] == [tree.token_list for tree in others]
    assert len({tuple(tree.token_list) for tree in trees}) > 3


def test_a_chunk_of_no_tokens_is_refused():
    with pytest.raises(TercelError, match="at least one prompt token a step, not 0"):
        Engine(tiny_target("llama"), Vanilla(), prefill_chunk=0).loop()


def test_rows_of_unlike_lengths_waste_at_most_a_tenth_of_target_and_head_together():
    target = tiny_target("llama", max_position_embeddings=4096)
    proposer = Eagle3(random_draft(target), target, TreeShape(3, 3, 8))
    loop = DecodingLoop(target, proposer, slots=5, prefill_chunk=500)
    prompts = [tuple(5 + (i * 7) % 90 for i in range(n)) for n in (1200, 60, 300, 150, 600)]
    for prompt in prompts:
        loop.submit(Request(prompt, SamplingParams(max_new_tokens=16, ignore_eos=True)))
    wasted = []
    while loop.pending:
        for event in loop.step():
            assert event.result is None or event.result.error is None
        if loop.memory.held:
            wasted.append(loop.memory.waste)
            assert proposer.memory.held * target.num_layers < 1.2 * loop.memory.held  # one layer, and no row's reserve
    assert len(wasted) > 10
    assert max(wasted) <= 0.1
    assert not loop.memory.held  # rows that left hold nothing


def peak_bytes(work: Callable[[], object]) -> int:
    """The most that tensors made within `work` took at a time, by what torch's allocator tells."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        work()
    held, most = 0, 0
    events = [event for event in watched.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def test_a_longer_prompt_takes_what_it_leaves_behind_and_no_more():
    """Beyond caches, the features that the head is going to read (held in parts, then joined) and the mask of a chunk,
    which has a column a slot, running a prompt takes no more for its length."""
    target = tiny_target("llama", max_position_embeddings=8192)
    draft = random_draft(target, max_position_embeddings=8192)
    features = 2 * (1 + len(draft.head.config.feature_layers)) * target.hidden_size * 4
    mask = CHUNK * (1 + 4 + 2 * 4)  # bytes a slot: what is seen, what that adds, and again for each head
    beyond = []
    for length in (1024, 4096):
        loop = DecodingLoop(target, Eagle3(draft, target, TreeShape(3, 3, 8)))
        loop.submit(Request(tuple(5 + (i * 7) % 90 for i in range(length)), SamplingParams(max_new_tokens=9)))
        most = peak_bytes(loop.step)
        assert loop.pending
        assert most > loop.memory.held + length * features / 2  # it is seen
        beyond.append(most - loop.memory.held - length * (features + mask))
    assert beyond[1] <= beyond[0]
