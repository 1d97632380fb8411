"""RoPE that follows the length of a sequence: one set of factors for all of a row, whatever is run beside it."""

from __future__ import annotations

import pytest
import torch

from tercel.decode.eagle3 import Eagle3
from tercel.decode.engine import Engine
from tercel.decode.sampled_chain import SampledChain
from tercel.decode.sampling import SamplingParams
from tercel.decode.types import Request
from tercel.decode.vanilla import Vanilla
from tercel.draft import HeadConfig
from tercel.draft.layers import Rotary
from tercel.draft.shape import TreeShape
from tercel.errors import TercelError
from tercel.measure.rounding import run_shapes
from tercel.target_model.model import Target
from tercel.target_model.prefill import prefill
from tercel.target_model.sources import Source
from tests.decode.drafts import Oracle, random_draft
from tests.tiny import VOCAB, tiny_model, tiny_tokenizer

NEW = 24


def target_with(arch: str, **settings) -> Target:
    return Target(tiny_model(arch, **settings), tiny_tokenizer(), Source(arch, arch, "folder", None))


def longrope(border: int = 60, longest: int = 256, arch: str = "phi3") -> Target:
    # fmt: off
    factors = {"short_factor": [1.0, 1.1, 1.3, 1.6], "long_factor": [3.0, 6.0, 12.0, 24.0]}
    # fmt: on
    rope = {"rope_type": "longrope", "rope_theta": 100.0, "original_max_position_embeddings": border, **factors}
    return target_with(
        arch,
        num_hidden_layers=4,
        max_position_embeddings=longest,
        rope_parameters=rope,
        **({"original_max_position_embeddings": border} if arch == "phi3" else {}),
    )


def text(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(torch.randint(4, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


@torch.no_grad()
def whole_forwards(target: Target, prompt: tuple[int, ...], new: int = NEW) -> tuple[int, ...]:
    """Greedy tokens of the stock model, each from one forward over everything before it."""
    tokens = list(prompt)
    for _ in range(new):
        tokens.append(int(target.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tuple(tokens[len(prompt) :])


def generated(target: Target, prompt: tuple[int, ...]) -> tuple[int, ...]:
    tokens = torch.tensor([prompt])
    out = target.model.generate(
        tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=NEW, eos_token_id=VOCAB
    )
    return tuple(out[0, len(prompt) :].tolist())


def texts(target: Target, proposer, prompts, slots: int = 1, **params):
    asked = [Request(p, SamplingParams(**{"max_new_tokens": NEW, "ignore_eos": True, **params})) for p in prompts]
    return [result.tokens for result in Engine(target, proposer, slots=slots).generate(asked)]


def test_texts_on_both_sides_of_the_border_and_across_it():
    target = longrope()
    prompts = [text(n, n) for n in (5, 50, 59, 60, 61, 100)]
    truth = [whole_forwards(target, prompt) for prompt in prompts]
    assert truth == [generated(target, prompt) for prompt in prompts]
    draft, answers = random_draft(target), dict(zip(prompts, truth, strict=True))

    for slots in (1, 3, 6):  # short rows beside long ones
        assert texts(target, Vanilla(), prompts, slots) == truth
        assert texts(target, Eagle3(draft, target, TreeShape(5, 4, 20)), prompts, slots) == truth
        assert texts(target, SampledChain(draft, target, 4), prompts, slots) == truth
        assert texts(target, Oracle(answers, depth=5), prompts, slots) == truth


def test_a_class_of_which_generate_mixes_factors_gives_what_whole_forwards_do():
    target, prompt = longrope(arch="llama"), text(50)
    truth = whole_forwards(target, prompt)
    assert generated(target, prompt) != truth  # or this test shows nothing
    assert texts(target, Eagle3(random_draft(target), target, TreeShape(4, 3, 10)), [prompt]) == [truth]


def test_a_prompt_above_the_border_and_above_one_piece_of_prefill():
    target, prompt = longrope(600, 1024), text(700)
    truth = whole_forwards(target, prompt, 8)
    assert texts(target, Vanilla(), [prompt, text(20)], 2, max_new_tokens=8)[0] == truth


def test_the_border_itself_changes_the_text():
    """Or the tests above show nothing."""
    target, prompt = longrope(), text(61)
    assert whole_forwards(target, prompt) != whole_forwards(longrope(255), prompt)


def test_encode_ends_at_every_token_as_one_forward_does():
    target, tokens = longrope(), torch.tensor([text(70, 1), text(70, 2)])
    out = target.encode(tokens, (1, 2))
    for end in (1, 59, 60, 61, 70):
        alone = target.model(input_ids=tokens[:, :end], use_cache=False, output_hidden_states=True).hidden_states
        torch.testing.assert_close(out.hidden[:, end - 1], alone[-1][:, -1], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(out.layers[1][:, end - 1], alone[2][:, -1], rtol=1e-4, atol=1e-4)


def test_rounding_is_measured_within_one_set_of_factors():
    shapes = run_shapes(longrope(), text(50), text(20, 1))
    assert shapes.gap_noise() < 1e-3


def test_a_block_across_the_border_is_refused():
    target = longrope()
    cache = target.new_cache(1, 80)
    prefill(target, [text(58)], cache)
    assert target.block_depth(58) == 1
    target.forward(torch.tensor([[5, 6]]), torch.tensor([[58, 59]]), cache)
    with pytest.raises(TercelError, match="crosses position 60"):
        target.forward(torch.tensor([[5, 6, 7]]), torch.tensor([[58, 59, 60]]), cache)
    prefill(target, [[5, 6]], cache)
    with pytest.raises(TercelError, match="renew the cache"):
        target.forward(torch.tensor([[7]]), torch.tensor([[60]]), cache)


def test_dynamic_ntk_ends_where_its_frequencies_would_change():
    rope = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0}
    target = target_with("llama", max_position_embeddings=64, rope_parameters=rope)
    prompt = text(50)
    truth = whole_forwards(target, prompt, 14)
    draft = random_draft(target)
    assert texts(target, Vanilla(), [prompt]) == [truth]
    assert texts(target, Eagle3(draft, target, TreeShape(5, 8, 30)), [prompt, text(20)], 2)[0] == truth
    with pytest.raises(TercelError, match=r"takes 64 with the answer, because beyond that its RoPE rotates all"):
        texts(target, Vanilla(), [text(64)])


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_a_head_has_one_set_of_frequencies(kind):
    target = (
        longrope()
        if kind == "longrope"
        else target_with("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0})
    )
    config = HeadConfig.for_target(
        target.config, feature_layers=(1,), vocab_size=VOCAB, draft_vocab_size=VOCAB, max_position_embeddings=256
    )
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 100.0}
    # heads made elsewhere may name such a type
    named = HeadConfig(**{**config.__dict__, "rope_parameters": dict(target.config.rope_parameters)})
    rotary, positions = Rotary.of(named), torch.arange(2000)
    cos, _ = rotary.cos_sin(positions, torch.float32)
    torch.testing.assert_close(rotary.cos_sin(positions[:50], torch.float32)[0], cos[:50])
    torch.testing.assert_close(rotary.cos_sin(positions[1990:], torch.float32)[0], cos[1990:])
