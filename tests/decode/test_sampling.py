"""Processors against Hugging Face's and by hand, the draw's edges, and the numbered randomness."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tercel.decode.history import TokenHistory
from tercel.decode.sampling import (
    RandomStream,
    SamplingParams,
    choose_token,
    greedy_token,
    processed_logits,
    sample,
    target_distribution,
)
from tercel.errors import TercelError


def history_of(prompt: list[int], generated: list[int], vocab: int) -> TokenHistory:
    history = TokenHistory(prompt, vocab)
    for token in generated:
        history.push(token)
    return history


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    vocab=st.sampled_from([2, 7, 50]),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 3, 60]),
    top_p=st.sampled_from([0.05, 0.6, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.1, 1.0]),
    penalty=st.sampled_from([0.7, 1.0, 1.4]),
)
def test_distribution_agrees_with_hugging_face(seed, vocab, temperature, top_k, top_p, min_p, penalty):
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randn(vocab, generator=rng, dtype=torch.float64) * 3
    prompt, answer = torch.randint(vocab, (2, 4), generator=rng).tolist()
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=penalty)
    reference = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(penalty)])
    reference.append(TemperatureLogitsWarper(temperature))
    if top_k:
        reference.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        reference.append(TopPLogitsWarper(top_p))
    if min_p:
        reference.append(MinPLogitsWarper(min_p))
    expected = reference(torch.LongTensor([prompt + answer]), logits.clone()[None])[0].softmax(0)

    probs = target_distribution(logits, params, history_of(prompt, answer, vocab))
    assert probs.dtype == torch.float64
    torch.testing.assert_close(probs, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.9, 0.999, 1 - 1e-15])
@pytest.mark.parametrize("spread", [0.0, 0.3, 3.0])
def test_nucleus_of_a_large_vocabulary_is_the_one_of_a_full_sort(top_p, spread):
    rng = torch.Generator().manual_seed(5)
    logits = (torch.randn(20_000, generator=rng) * spread).round(decimals=1)  # rounded: many ties
    probs = logits.double().softmax(0)
    ordered, order = torch.sort(probs, descending=True, stable=True)
    short = int((ordered.cumsum(0) < top_p).sum())
    expected = set(order[: short + 1].tolist())

    kept = target_distribution(logits, SamplingParams(temperature=1, top_p=top_p), TokenHistory([], 20_000))
    assert set(kept.nonzero().squeeze(1).tolist()) == expected
    assert float(kept.sum()) == pytest.approx(1, abs=1e-12)


def test_penalties_and_bias_by_hand():
    logits = torch.tensor([2.0, -2.0, 4.0, 1.0, 0.5])
    history = history_of([0, 1], [2, 2, 3], 5)
    params = SamplingParams(
        repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.5, logit_bias={4: 3.0, 0: -1.0}
    )
    # Bias first. Repetition: 0, 1 (prompt), 2, 3 (answer). Presence and frequency: the answer only.
    expected = torch.tensor([(2.0 - 1.0) / 2, -4.0, 2.0 - 0.25 - 1.0, 0.5 - 0.25 - 0.5, 3.5])
    torch.testing.assert_close(processed_logits(logits, params, history), expected)
    assert greedy_token(logits, params, history) == 4
    assert greedy_token(logits, SamplingParams(), history) == 2


def test_half_precision_logits_are_processed_in_float32():
    logits = torch.tensor([300.0, 299.0], dtype=torch.bfloat16)  # 299 and 300 round alike, 300 - 0.5 would too
    params = SamplingParams(presence_penalty=0.5)
    assert processed_logits(logits, params, history_of([], [0], 2)).tolist() == [299.5, float(logits[1])]


def test_processors_that_are_off_cost_no_copy():
    logits = torch.randn(5)
    assert processed_logits(logits, SamplingParams(), TokenHistory([], 5)) is logits


@given(
    prompt=st.lists(st.integers(0, 5), max_size=6),
    steps=st.lists(st.one_of(st.integers(0, 5), st.just(-1)), max_size=20),
    ask_at=st.integers(0, 20),
)
def test_history_counts_what_is_in_it(prompt, steps, ask_at):
    history, generated = TokenHistory(prompt, 6), []
    for index, step in enumerate(steps):
        if index == ask_at:
            history.seen_counts()  # from here on the counts are kept step by step
        if step >= 0:
            history.push(step)
            generated.append(step)
        elif generated:
            history.pop()
            generated.pop()
    assert history.position == len(generated)
    assert history.generated_counts().tolist() == [generated.count(t) for t in range(6)]
    assert history.seen_counts().tolist() == [(prompt + generated).count(t) for t in range(6)]


def test_history_refuses_foreign_prompts_and_empty_pops():
    with pytest.raises(TercelError, match="token id 6"):
        TokenHistory([1, 6], 6)
    with pytest.raises(ValueError, match="cannot pop 1 of 0"):
        TokenHistory([1], 6).pop()


def test_temperature_zero_is_one_hot_and_its_limit():
    logits = torch.tensor([1.0, 3.0, 3.0, 2.0])
    history = TokenHistory([], 4)
    assert target_distribution(logits, SamplingParams(), history).tolist() == [0, 1, 0, 0]
    assert choose_token(logits, SamplingParams(), history, RandomStream(1)) == 1  # lowest id among equals
    tiny = target_distribution(logits, SamplingParams(temperature=1e-300), history)
    assert tiny.tolist() == [0, 0.5, 0.5, 0]


def test_ties_at_the_border():
    logits = torch.tensor([0.0, 1.0, 1.0, 1.0])
    history = TokenHistory([], 4)
    top_k = target_distribution(logits, SamplingParams(temperature=1, top_k=2), history)
    assert (top_k > 0).tolist() == [False, True, True, True]
    top_p = target_distribution(logits, SamplingParams(temperature=1, top_p=0.5), history)
    assert (top_p > 0).tolist() == [False, True, True, False]


@given(
    weights=st.lists(st.one_of(st.just(0.0), st.floats(1e-12, 1.0)), min_size=1, max_size=30).filter(any),
    uniform=st.one_of(st.floats(0, 1, exclude_max=True), st.just(0.0), st.just(math.nextafter(1, 0))),
)
def test_sample_inverts_the_cdf_and_never_takes_an_impossible_token(weights, uniform):
    probs = torch.tensor(weights, dtype=torch.float64)
    token = sample(probs, uniform)
    assert weights[token] > 0
    total, slack = math.fsum(weights), 1e-12 * math.fsum(weights)
    assert math.fsum(weights[:token]) - slack <= uniform * total <= math.fsum(weights[: token + 1]) + slack


def test_sample_at_the_edges():
    probs = torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0])
    almost_one = math.nextafter(1, 0)
    assert [sample(probs, u) for u in (0.0, 0.2499, 0.25, almost_one)] == [1, 1, 3, 3]
    assert sample(torch.tensor([0.1] * 10 + [0.0] * 5), almost_one) == 9
    with pytest.raises(TercelError, match="add up to 0"):
        sample(torch.zeros(3), 0.5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_are_named(bad, temperature):
    with pytest.raises(TercelError, match="generated token 2"):
        choose_token(
            torch.tensor([0.0, bad, 1.0]),
            SamplingParams(temperature=temperature, top_k=1),
            history_of([], [0, 0], 3),
            RandomStream(0),
        )


def test_bias_outside_the_vocabulary_is_an_error():
    with pytest.raises(TercelError, match="logit_bias names token id 9"):
        processed_logits(torch.zeros(4), SamplingParams(logit_bias={9: 1.0}), TokenHistory([], 4))


def test_uniforms_are_numbered():
    stream = RandomStream(7)
    forward = [stream.uniform(i) for i in range(50)]
    assert [RandomStream(7).uniform(i) for i in reversed(range(50))] == forward[::-1]
    others = [RandomStream(8).uniform(i) for i in range(50)]
    lanes = [stream.uniform(i, 1) for i in range(50)]
    drafts = [stream.for_drafts().uniform(i) for i in range(50)]
    assert len({*forward, *others, *lanes, *drafts}) == 200
    assert RandomStream(2**64 - 1).uniform(0) != RandomStream(0).uniform(0)
    assert RandomStream().seed != RandomStream().seed


def test_uniforms_are_uniform_over_seeds_positions_and_lanes():
    """Chi-square, 31 degrees of freedom, fixed seeds: a good generator exceeds 61.1 once in 1,000 times."""
    draws = {
        "seeds": [RandomStream(seed).uniform(3) for seed in range(3200)],
        "positions": [RandomStream(3).uniform(index) for index in range(3200)],
        "lanes": [RandomStream(3).uniform(5, lane) for lane in range(3200)],
    }
    for name, values in draws.items():
        counts = torch.histc(torch.tensor(values, dtype=torch.float64), 32, 0, 1)
        assert float(((counts - 100) ** 2 / 100).sum()) < 61.1, name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", 10**40),
        ("top_k", -1),
        ("top_k", 2.5),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 10**40),
        ("repetition_penalty", 1e-39),
        ("presence_penalty", -1e39),
        ("presence_penalty", float("inf")),
        ("frequency_penalty", "1"),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: float("nan")}),
        ("logit_bias", {1: 10**40}),
        ("seed", -1),
        ("seed", 2**64),
        ("max_new_tokens", 0),
        ("max_new_tokens", 2**64),
        ("stop", "end"),
        ("stop", ("",)),
        ("stop_token_ids", (-2,)),
    ],
)
def test_values_out_of_range_are_named(name, value):
    with pytest.raises(TercelError, match=f"sampling parameter {name} is"):
        dataclasses.replace(SamplingParams(), **{name: value})
