"""What a generation config asks for, against the processors that stock `generate()` itself makes of it."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig

from tercel.decode.history import TokenHistory
from tercel.decode.rules import TokenRules
from tercel.decode.sampling import SamplingParams, greedy_token, processed_logits, target_distribution
from tercel.errors import TercelError
from tests.tiny import tiny_model

V = 11
LIMIT = 6  # new tokens


@cache
def model():
    return tiny_model("llama", vocab_size=V, num_hidden_layers=1)


def stock(prompt: list[int], answer: list[int], logits: torch.Tensor, ends: list[int], **asked) -> torch.Tensor:
    """What stock generation makes of the logits [V] after these tokens."""
    config = GenerationConfig(**asked, max_length=len(prompt) + LIMIT)
    config._eos_token_tensor = torch.tensor(ends) if ends else None
    processors = model()._get_logits_processor(config, len(prompt), device="cpu")
    return processors(torch.tensor([prompt + answer]), logits[None].clone())[0]


ids = st.integers(0, V - 1)
lists = st.lists(ids, min_size=1, max_size=3)
sequences = st.lists(ids, min_size=1, max_size=3).map(tuple)
scale = st.sampled_from([-3.0, -0.5, 0.25, 2.0])

RULES = {
    "sequence_bias": st.dictionaries(sequences, scale, min_size=1, max_size=6).map(lambda found: tuple(found.items())),
    "no_repeat_ngram_size": st.integers(1, 3),
    "bad_words_ids": st.lists(sequences, min_size=1, max_size=6).map(tuple),
    "min_length": st.integers(1, 9),
    "min_new_tokens": st.integers(1, 4),
    "forced_bos_token_id": ids,
    "forced_eos_token_id": lists.map(tuple),
    "remove_invalid_values": st.just(True),
    "exponential_decay_length_penalty": st.tuples(st.integers(0, 3), st.sampled_from([0.9, 1.5])),
    "suppress_tokens": lists.map(tuple),
    "begin_suppress_tokens": lists.map(tuple),
    "renormalize_logits": st.just(True),
}


def as_config(rules: dict) -> dict:
    """The rules as a generation config has them."""
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in rules.items()}
    if "bad_words_ids" in values:
        values["bad_words_ids"] = [list(word) for word in values["bad_words_ids"]]
    if "sequence_bias" in values:
        values["sequence_bias"] = [[list(word), bias] for word, bias in values["sequence_bias"]]
    return values


situations = {
    "seed": st.integers(0, 2**31),
    "rules": st.fixed_dictionaries({}, optional=RULES),
    "ends": st.lists(ids, min_size=1, max_size=2, unique=True),
    "prompt": st.lists(ids, min_size=1, max_size=6),
    "answer": st.lists(ids, max_size=LIMIT - 1),
    "penalty": st.sampled_from([0.7, 1.0, 1.3]),
}


def refused(rules: dict, ends: list[int]) -> bool:
    """Stock generation refuses bad words that are nothing but end tokens, and to force what is suppressed."""
    words = rules.get("bad_words_ids", ((-1,),))
    forced = [{rules.get("forced_bos_token_id", -1)}, {*rules.get("forced_eos_token_id", (-1,))}]
    return all(len(word) == 1 and word[0] in ends for word in words) or any(
        ids <= {*rules.get("suppress_tokens", ())} for ids in forced
    )


@settings(max_examples=200, deadline=None)
@given(**situations)
def test_processed_logits_are_stock_generations_bit_for_bit(seed, rules, ends, prompt, answer, penalty):
    if refused(rules, ends):
        return
    logits = torch.randn(V, generator=torch.Generator().manual_seed(seed)) * 4
    expected = stock(prompt, answer, logits, ends, repetition_penalty=penalty, **as_config(rules))
    params = SamplingParams(
        repetition_penalty=penalty, max_new_tokens=LIMIT, rules=TokenRules(**rules, eos_token_ids=tuple(ends))
    )
    history = TokenHistory(prompt, V)
    history.completions(rules.get("no_repeat_ngram_size", 1))  # from here on the n-grams are kept step by step
    for token in answer:
        history.push(token)
    for token in (1, 1, 2):  # a path of the tree that is taken back
        history.push(token)
    history.pop(3)
    found = processed_logits(logits, params, history)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@settings(max_examples=150, deadline=None)
@given(
    **situations,
    bias=st.dictionaries(ids, scale, max_size=3),
    temperature=st.sampled_from([0.4, 1.0, 1.6]),
    top_k=st.sampled_from([0, 2, 5]),
    top_p=st.sampled_from([0.3, 0.8, 1.0]),
    min_p=st.sampled_from([0.0, 0.15]),
)
def test_the_distribution_is_stock_generations(
    seed, rules, ends, prompt, answer, penalty, bias, temperature, top_k, top_p, min_p
):
    if refused(rules, ends):
        return
    logits = torch.randn(V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 4
    asked = as_config({**rules, "sequence_bias": tuple(dict(rules.get("sequence_bias", ())).items())})
    single = {(token,): value for token, value in bias.items()}
    asked["sequence_bias"] = {**{tuple(w): b for w, b in asked["sequence_bias"]}, **single} or None
    sampled = {"do_sample": True, "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    expected = stock(prompt, answer, logits, ends, repetition_penalty=penalty, **asked, **sampled)
    likely = stock(prompt, answer, logits, ends, repetition_penalty=penalty, **asked).softmax(0)
    likely = likely[likely > 0]
    if not expected.max().isfinite() or len(likely.unique()) < len(likely):
        return  # no token is left, a score left the floats, or a tie that stock generation resolves by chance
    longer = tuple((word, value) for word, value in dict(rules.get("sequence_bias", ())).items() if word not in single)
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=penalty,
        logit_bias=bias,
        max_new_tokens=LIMIT,
        rules=TokenRules(**{**rules, "sequence_bias": longer}, eos_token_ids=tuple(ends)),
    )
    history = TokenHistory(prompt, V)
    for token in answer:
        history.push(token)
    found = target_distribution(logits, params, history)
    torch.testing.assert_close(found, expected.softmax(0), rtol=0, atol=1e-6)


def test_rules_on_length_are_about_what_ends_the_answer():
    logits = torch.arange(4.0)
    rules = TokenRules(min_new_tokens=1, eos_token_ids=(3,))
    history = TokenHistory([0], 4)
    assert greedy_token(logits, SamplingParams(rules=rules), history) == 2
    assert greedy_token(logits, SamplingParams(rules=rules, stop_token_ids=(2,)), history) == 1
    assert greedy_token(logits, SamplingParams(rules=rules, ignore_eos=True), history) == 3  # it ends nothing
    history.push(0)
    assert greedy_token(logits, SamplingParams(rules=rules), history) == 3


@pytest.mark.parametrize("factor", [1e200, 10**400, float("inf")], ids=["float", "int", "inf"])
def test_a_length_penalty_that_outgrows_floats_stays_finite(factor):
    rules = TokenRules(exponential_decay_length_penalty=(0, factor), eos_token_ids=(0,))
    history = TokenHistory([1], 3)
    for _ in range(3):
        history.push(1)
    assert greedy_token(torch.tensor([0.5, 3.0, 1.0]), SamplingParams(rules=rules), history) == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rules_that_leave_no_token_are_named(temperature):
    params = SamplingParams(temperature=temperature, rules=TokenRules(suppress_tokens=(0, 1)))
    with pytest.raises(TercelError, match="no token is left"):
        target_distribution(torch.zeros(2), params, TokenHistory([0], 2))


def test_ids_outside_the_vocabulary_are_an_error():
    params = SamplingParams(rules=TokenRules(bad_words_ids=((1, 9),)))
    with pytest.raises(TercelError, match="a rule names token id 9"):
        processed_logits(torch.zeros(4), params, TokenHistory([0], 4))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sequence_bias", (((1,), "x"),)),
        ("sequence_bias", (((), 1.0),)),
        ("no_repeat_ngram_size", 1.5),
        ("bad_words_ids", ((),)),
        ("bad_words_ids", ((-1,),)),
        ("min_length", -1),
        ("min_new_tokens", True),
        ("forced_bos_token_id", "1"),
        ("forced_eos_token_id", (1.0,)),
        ("exponential_decay_length_penalty", (1, float("nan"))),
        ("sequence_bias", (((1,), 10**40),)),
        ("sequence_bias", (((1,), -1e39),)),
        ("suppress_tokens", [1]),
        ("remove_invalid_values", 1),
    ],
)
def test_what_is_no_rule_is_named(name, value):
    with pytest.raises(TercelError, match=f"the rule {name} cannot be"):
        TokenRules(**{name: value})
