"""What a target's generation config asks for is done as stock `generate()` does it, drafted or not; where it ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from tercel.decode.eagle3 import Eagle3
from tercel.decode.engine import Engine
from tercel.decode.generation_config import Adopted, Asked, described, sampling_for
from tercel.decode.sampling import SamplingParams
from tercel.decode.types import Request
from tercel.decode.vanilla import Vanilla
from tercel.draft.shape import TreeShape
from tercel.errors import TercelError
from tercel.measure.methods import TransformersMethod
from tercel.target_model.model import Target
from tests.decode.drafts import Oracle, random_draft, tiny_target
from tests.tiny import CHATML, IM_END, tiny_model, tiny_tokenizer

PROMPTS = [tuple(range(5, 5 + n)) for n in (5, 12, 1)]
NEW = 20

CONFIGS: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.4},
    "ngrams": {"no_repeat_ngram_size": 1},
    "suppressed": {"suppress_tokens": [7, 41, 126, -1, 500], "begin_suppress_tokens": list(range(60))},
    "length": {"min_new_tokens": 9, "exponential_decay_length_penalty": [9, 1.5]},
    "minimum": {"min_length": 14},
    "forced": {"forced_bos_token_id": 9, "forced_eos_token_id": [30, 40]},
    "bias": {"sequence_bias": [[[8], -4.0], [[9, 8], 9.0]]},
    "others": {"renormalize_logits": True, "remove_invalid_values": True, "suppress_tokens": [82]},
    "stop": {"stop_strings": ["ing", "t"]},
}


@cache
def target() -> Target:
    return tiny_target("llama")


@contextmanager
def asking(target: Target, *, ends: Any = IM_END, **values: Any) -> Iterator[None]:
    own = target.model.generation_config
    target.model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=1, **values)
    try:
        yield
    finally:
        target.model.generation_config = own


def adopt(target: Target, *, sample: bool = False, generation_config: bool = True) -> Adopted:
    return Asked({}, sample, generation_config).of(target)


def stock(prompt: tuple[int, ...], **how: Any) -> tuple[int, ...]:
    """What `generate()` makes of the model's own generation config."""
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    out = target().model.generate(ids, attention_mask=mask, max_new_tokens=NEW, tokenizer=target().tokenizer, **how)
    return tuple(out[0, len(prompt) :].tolist())


def texts(proposer, params: SamplingParams) -> list[tuple[int, ...]]:
    asked = [Request(prompt, params) for prompt in PROMPTS]
    return [result.tokens for result in Engine(target(), proposer, slots=2).generate(asked)]


@cache
def unasked(prompt: tuple[int, ...]) -> tuple[int, ...]:
    params = SamplingParams(max_new_tokens=NEW)
    return Engine(target(), Vanilla()).generate([Request(prompt, params)])[0].tokens


def bad_words() -> dict[str, Any]:
    """Words of one, two and three tokens that the answers would hold."""
    first, second = unasked(PROMPTS[0]), unasked(PROMPTS[1])
    return {"bad_words_ids": [[first[1]], list(first[3:5]), list(second[4:7]), [IM_END]]}


@pytest.mark.parametrize("name", [*CONFIGS, "bad words", "all"])
def test_text_is_stock_generations_drafted_or_not(name):
    every = {**CONFIGS["repetition"], **CONFIGS["length"], "suppress_tokens": [7, 41], **bad_words()}
    asked = {"bad words": bad_words(), "all": every}.get(name) or CONFIGS[name]
    ends = [IM_END, unasked(PROMPTS[0])[6]]  # one that comes early, for the rules on length
    with asking(target(), ends=ends):
        plain = texts(Vanilla(), SamplingParams(max_new_tokens=NEW))
    with asking(target(), ends=ends, **asked):
        params = sampling_for(target(), max_new_tokens=NEW)
        ours = texts(Vanilla(), params)
        assert ours == [stock(prompt) for prompt in PROMPTS]
        assert ours == [TransformersMethod(target()).run(prompt, params).tokens for prompt in PROMPTS]
        draft = random_draft(target(), pruned=False)
        assert ours == texts(Eagle3(draft, target(), TreeShape(5, 4, 20)), params)
        assert ours == texts(Oracle(dict(zip(PROMPTS, ours, strict=True))), params)
        off = sampling_for(target(), max_new_tokens=NEW, generation_config=False)
        assert plain == texts(Vanilla(), off)
        assert plain == [TransformersMethod(target()).run(prompt, off).tokens for prompt in PROMPTS]
    assert ours != plain


def test_sampled_text_keeps_its_seed_and_its_draws_follow_the_config():
    with asking(target(), do_sample=True, temperature=1.7, top_k=9, top_p=0.8, min_p=0.01, **CONFIGS["repetition"]):
        params = sampling_for(target(), sample=True, seed=4, max_new_tokens=NEW)
        assert (params.temperature, params.top_k, params.top_p, params.min_p) == (1.7, 9, 0.8, 0.01)
        draft = random_draft(target(), pruned=False)
        assert texts(Vanilla(), params) == texts(Eagle3(draft, target(), TreeShape(5, 4, 20)), params)


def test_what_is_given_wins_and_nothing_is_drawn_unasked():
    asked = {"do_sample": True, "temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1, "no_repeat_ngram_size": 3}
    with asking(target(), **asked):
        greedy = adopt(target())
        assert greedy.params.greedy
        assert (greedy.params.repetition_penalty, greedy.params.rules.no_repeat_ngram_size) == (1.1, 3)
        assert len(greedy.notes) == 2
        assert "repetition_penalty=1.1, no_repeat_ngram_size=3; --no-generation-config" in greedy.notes[0]
        assert "would draw tokens (temperature=0.6, top_k=20); this is greedy, and --sample" in greedy.notes[1]
        own = sampling_for(target(), temperature=0.9, repetition_penalty=1.0, top_p=0.5)
        assert (own.temperature, own.top_k, own.top_p, own.repetition_penalty) == (0.9, 20, 0.5, 1.0)
        off = adopt(target(), sample=True, generation_config=False)
        assert off.params == SamplingParams(temperature=1.0, rules=off.params.rules)
        assert off.params.rules.off
        assert off.notes == ()
        with pytest.raises(TercelError, match="temperature 0 is greedy, but sampling is asked for"):
            sampling_for(target(), sample=True, temperature=0.0)
    with asking(target(), temperature=0.0, top_k=0):  # as some write for greedy
        assert sampling_for(target(), sample=True).temperature == 1.0
    with asking(target(), repetition_penalty=1.5, suppress_tokens=[5]):
        assert described(sampling_for(target(), seed=3, stop=("x",))) == (
            "repetition_penalty=1.5, stop=('x',), suppress_tokens=(5,), eos_token_ids=(3,)"
        )
    with asking(target(), sequence_bias=[[[5], 1.0], [[6], 1.0], [[5, 6], 1.0]]):
        params = sampling_for(target(), logit_bias={5: -1.0})
        assert params.rules.sequence_bias == (((6,), 1.0), ((5, 6), 1.0))
    assert Request.chat(target(), "x").params == sampling_for(target())


def test_what_cannot_be_done_is_said():
    with asking(target(), num_beams=4, typical_p=0.9, suppress_tokens=list(range(40, 80))):
        greedy, drawn = adopt(target()).notes, adopt(target(), sample=True).notes
    assert "suppress_tokens=(40 of them)" in greedy[0]
    assert "also asks for num_beams=4, which is not supported and left out" in greedy[1]
    assert "also asks for num_beams=4, typical_p=0.9, which is not supported and left out" in drawn[1]


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"repetition_penalty": "x"}, "repetition_penalty is 'x'"),
        ({"repetition_penalty": -1.0}, "repetition_penalty is -1.0"),
        ({"repetition_penalty": 10**40}, "repetition_penalty is 10000"),
        ({"temperature": 10**40}, "temperature is 10000"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"suppress_tokens": "abc"}, "the rule suppress_tokens cannot be 'abc'"),
        ({"bad_words_ids": [1, 2]}, "the rule bad_words_ids cannot be"),
        ({"sequence_bias": [[1]]}, "the rule sequence_bias cannot be"),
        ({"exponential_decay_length_penalty": [1]}, "the rule exponential_decay_length_penalty cannot be"),
        ({"min_new_tokens": 2.5}, "the rule min_new_tokens cannot be 2.5"),
        ({"forced_eos_token_id": [500]}, "it forces token id 500"),
        ({"num_beams": "many"}, "'>' not supported"),
        ({"stop_strings": [1]}, "stop is"),
    ],
)
def test_a_config_that_means_nothing_is_refused(asked, named):
    own = target().model.generation_config
    config = GenerationConfig(eos_token_id=IM_END)
    for name, value in asked.items():
        setattr(config, name, value)
    target().model.generation_config = config
    try:
        with pytest.raises(TercelError, match="the generation config of llama cannot be followed") as caught:
            adopt(target())
        assert named in str(caught.value)
        assert "--no-generation-config" in str(caught.value)
        assert adopt(target(), generation_config=False).params.rules.off
    finally:
        target().model.generation_config = own


def ending(tokenizer_end: str | None, template: str | None, config_end: Any, generation_end: Any) -> Target:
    tokenizer = tiny_tokenizer(template)
    tokenizer.eos_token = tokenizer_end
    model = tiny_model("llama", num_hidden_layers=3)
    model.config.eos_token_id = config_end
    model.generation_config = GenerationConfig(eos_token_id=generation_end)
    return Target(model, tokenizer, target().source)


def test_an_answer_ends_wherever_anyone_says_it_does():
    agreed = ending("<|im_end|>", CHATML, IM_END, [IM_END])
    assert agreed.eos_token_ids == (IM_END,)
    assert adopt(agreed).notes == ()
    apart = ending("<pad>", CHATML, 9, [8, 500, -1])
    assert apart.eos_token_ids == (8, 9, 1, IM_END)
    (note,) = adopt(apart).notes
    assert note == (
        "the generation config ends an answer at '%'; here it also ends at '<pad>' (the tokenizer), '<|im_end|>' "
        "(the chat template), '&' (the model's config)"
    )
    base = ending("<|im_end|>", None, None, None)  # no template
    assert base.eos_token_ids == (IM_END,)
    assert adopt(base).notes == ()
    assert ending(None, None, None, None).eos_token_ids == ()
    with pytest.raises(TercelError, match="eos_token_id of the generation config of llama is 'x'"):
        _ = ending("<pad>", CHATML, None, "x").eos_token_ids


def test_an_answer_ends_at_the_turn_end_that_only_the_template_knows():
    bound = ending("<pad>", CHATML, None, 8)
    prompt = PROMPTS[0]
    bias = SamplingParams(max_new_tokens=NEW, logit_bias={IM_END: 1000.0})
    (result,) = Engine(bound, Vanilla()).generate([Request(prompt, bias)])
    assert (result.tokens, result.finish_reason, result.text) == ((IM_END,), "stop", "")
