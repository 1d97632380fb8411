"""Prompts run together, padded and in chunks, end as prompts run alone do."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tercel.target_model.model import Target
from tercel.target_model.prefill import PADDING, Prompt, plan_chunk, prefill, right_padded, run_chunk
from tests.target_model.test_model import LAYERS, at, same, some_tokens, target_of
from tests.target_model.test_rope import longrope

LENGTHS = st.lists(st.integers(1, 24), min_size=1, max_size=4)  # windows of the tiny models: 8
FEW = settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def continued(target: Target, cache, tokens: list[int]):
    """A further token for every row."""
    positions = torch.tensor([[length] for length in cache.lengths])
    return target.forward(torch.tensor([[token] for token in tokens]), positions, cache, capture=LAYERS)


@pytest.mark.parametrize("arch", ["llama", "gemma3", "mistral", "mixtral", "gpt2", "gpt_oss", "qwen3_next"])
@FEW
@example(lengths=[9, 12, 10, 24, 2, 3], chunk=36, before=True)
@example(lengths=[12, 9, 10], chunk=512, before=False)
@given(lengths=LENGTHS, chunk=st.integers(1, 40), before=st.booleans())
def test_ragged_prompts_in_chunks_are_prompts_alone(arch, lengths, chunk, before):
    """Also after a row that holds something already: its own text goes on as if nobody had come."""
    target = target_of(arch)
    prompts = [some_tokens(length, 60 + i) for i, length in enumerate(lengths)]
    together = target.new_cache(1, 4)  # so small that it has to grow
    texts = [some_tokens(11, 59)] if before else []
    if before:
        prefill(target, texts, together)
    together.add_rows(len(prompts) - (not before))
    first = len(texts)
    texts += prompts
    outs = prefill(target, prompts, together, range(first, len(texts)), LAYERS, chunk)
    assert together.lengths == [len(text) for text in texts]
    after = continued(target, together, [7] * len(texts))
    for row, text in enumerate(texts):
        alone = target.new_cache(1, 40)
        (truth,) = prefill(target, [text], alone, capture=LAYERS)
        if row >= first:
            same(target, outs[row - first], truth)
        same(target, at(after, row, slice(None)), continued(target, alone, [7]))


@FEW
@given(lengths=st.lists(st.integers(50, 70), min_size=2, max_size=3), chunk=st.integers(20, 200))
def test_prompts_on_both_sides_of_a_border_of_rope_run_together(lengths, chunk):
    target = longrope(60)
    prompts = [some_tokens(length, 70 + i) for i, length in enumerate(lengths)]
    cache = target.new_cache(len(prompts), 80)
    for prompt, out in zip(prompts, prefill(target, prompts, cache, chunk=chunk), strict=True):
        own = target.model(input_ids=torch.tensor([prompt]), use_cache=False, output_hidden_states=True)
        torch.testing.assert_close(out.hidden, own.hidden_states[-1], rtol=1e-4, atol=1e-4)


def test_padding_has_no_position_past_the_last():
    """Learned positions end there: a short prompt beside one that fills the context must not ask for more."""
    target = target_of("gpt2")
    longest = target.context_length
    prompts = [some_tokens(longest, 1), some_tokens(longest - 9, 2)]
    cache = target.new_cache(3, 4)
    prefill(target, [prompts[0][: longest - 20]], cache, [0])
    rest = [prompts[0][longest - 20 :], prompts[1][: longest - 220], some_tokens(1, 3)]
    outs = prefill(target, rest, cache, capture=LAYERS)
    assert [out.hidden.shape[1] for out in outs] == [20, longest - 220, 1]
    whole = target.encode(torch.tensor([prompts[0]]), LAYERS)
    same(target, outs[0], at(whole, 0, slice(longest - 20, None)))
    assert right_padded([[5, 6, 7], [8]], [9, 250])[1].tolist() == [[9, 10, 11], [250, 250, 250]]


def test_like_lengths_share_one_forward_and_prompts_end_in_their_order():
    target, calls = target_of("llama"), []

    class Counted:
        def prefill_chunk(self, remaining, cache, rows, limit, capture=()):
            outs = target.prefill_chunk(remaining, cache, rows, limit, capture)
            calls.append([out.hidden.shape[1] for out in outs])
            return outs

    lengths = [8, 9, 7, 50, 2, 3, 3]
    cache = target.new_cache(len(lengths), 60)
    prompts = [Prompt(some_tokens(length, length)) for length in lengths]
    done = []
    while len(prompts) > sum(done):
        left = slice(sum(done), None)
        done.append(run_chunk(Counted(), prompts[left], cache, range(len(prompts))[left], 40))
    assert calls == [[8, 9, 7], [40], [10], [2, 3, 3]]
    assert done == [3, 0, 1, 3]


@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=8), limit=st.integers(1, 100))
def test_a_chunk_keeps_to_its_limit_and_wastes_little(lengths, limit):
    count, width = plan_chunk(lengths, limit)
    taken = [min(length, width) for length in lengths[:count]]
    assert count * width <= limit
    assert count * width <= PADDING * sum(taken)
    assert taken == lengths[:count] or (count, width) == (1, limit)
