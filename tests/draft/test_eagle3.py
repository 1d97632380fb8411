"""The head against the formulas of spec section 2, written out once more."""

from __future__ import annotations

import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig, Phi3Config

from tercel.draft import Eagle3Head, HeadConfig
from tercel.draft.layers import rotate
from tercel.errors import TercelError
from tercel.methods.p_eagle.module import PEagleConfig
from tests.draft.heads_for_tests import tiny_head, tiny_head_config


def rms(x, weight, eps=1e-5):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def test_one_token_alone_goes_through_the_formulas():
    head = tiny_head(tiny_head_config())
    w = {name: p.detach() for name, p in head.named_parameters()}
    embedding, features = torch.randn(16), torch.randn(48)
    hidden = head.fuse(features)
    torch.testing.assert_close(hidden, w["fc.weight"] @ features)
    now = head.project(embedding, hidden, torch.tensor(5))
    x = torch.cat(
        [
            rms(embedding, w["midlayer.input_layernorm.weight"]),
            rms(hidden, w["midlayer.hidden_norm.weight"]),
        ]
    )
    value = (w["midlayer.self_attn.v_proj.weight"] @ x).view(2, 8)
    torch.testing.assert_close(now.value, value)
    attended = value.repeat_interleave(2, 0).flatten()  # alone, it attends to itself
    h1 = hidden + w["midlayer.self_attn.o_proj.weight"] @ attended
    y = rms(h1, w["midlayer.post_attention_layernorm.weight"])
    gate, up = w["midlayer.mlp.gate_proj.weight"] @ y, w["midlayer.mlp.up_proj.weight"] @ y
    h2 = h1 + w["midlayer.mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up)
    output = head.finish(hidden, attended)
    torch.testing.assert_close(output, h2)
    torch.testing.assert_close(head.logits(output), w["lm_head.weight"] @ rms(h2, w["norm.weight"]))
    assert head.feedback(output) is output


def test_the_newer_heads_flags():
    head = tiny_head(tiny_head_config(fc_norm=True, norm_output=True))
    w = {name: p.detach() for name, p in head.named_parameters()}
    features = torch.randn(3, 48)
    parts = [rms(features[:, 16 * i : 16 * i + 16], w[f"fc_norm.{i}.weight"]) for i in range(3)]
    torch.testing.assert_close(head.fuse(features), torch.cat(parts, -1) @ w["fc.weight"].T)
    output = torch.randn(2, 16)
    torch.testing.assert_close(head.feedback(output), rms(output, w["norm.weight"]))


def test_rotation_turns_pairs_by_position_times_frequency():
    head = tiny_head(tiny_head_config(rope_parameters={"rope_type": "default", "rope_theta": 500.0}))
    positions = torch.tensor([[0, 3], [70, 901]])
    x = torch.randn(2, 2, 4, 8)
    turned = rotate(x, *head.rotary.cos_sin(positions, torch.float32))
    for i in range(4):
        angle = positions.double() * 500.0 ** (-2 * i / 8)
        z = torch.complex(x[..., i].double(), x[..., i + 4].double()) * torch.polar(
            torch.ones(2, 2, 1).double(), angle[..., None]
        )
        torch.testing.assert_close(turned[..., i].double(), z.real, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(turned[..., i + 4].double(), z.imag, rtol=1e-4, atol=1e-4)


def test_casting_the_head_leaves_the_frequencies_exact():
    head = tiny_head(tiny_head_config(head_dim=16))
    wanted = head.rotary.cos_sin(torch.tensor([1999]), torch.float32)
    head.to(torch.bfloat16)
    assert head.dtype == torch.bfloat16
    for ours, exact in zip(head.rotary.cos_sin(torch.tensor([1999]), torch.float32), wanted, strict=True):
        assert torch.equal(ours, exact)


def test_a_head_of_another_width_has_embeddings_of_its_own():
    names = dict(tiny_head(tiny_head_config(hidden_size=32)).named_parameters())
    assert names["embed_tokens.weight"].shape == (128, 32)
    assert names["fc.weight"].shape == (32, 48)


def test_sizes_and_rope_come_from_the_target():
    config = HeadConfig.for_target(
        LlamaConfig(
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=9,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=16,
            rms_norm_eps=1e-6,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 128,
            },
        ),
        feature_layers=(2, 4, 6),
        vocab_size=100,
        draft_vocab_size=50,
        max_position_embeddings=512,
    )
    assert (config.head_dim, config.num_key_value_heads, config.rms_norm_eps) == (16, 4, 1e-6)
    assert config.rope_parameters["rope_type"] == "llama3"
    Eagle3Head(config)
    assert HeadConfig.from_dict(config.to_dict()) == config


def test_rope_where_kinds_of_layers_differ_is_full_attentions():
    rope = {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    config = head_for(Gemma3TextConfig(hidden_size=32, num_hidden_layers=8, head_dim=8, rope_parameters=rope))
    assert config.rope_parameters == {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
    Eagle3Head(config)


def test_factors_of_a_partial_rotation_are_not_taken_for_the_whole():
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "short_factor": [1.0] * 2,
        "long_factor": [4.0] * 2,
        "original_max_position_embeddings": 64,
    }
    config = head_for(
        Phi3Config(
            hidden_size=32,
            num_attention_heads=4,
            num_hidden_layers=8,
            max_position_embeddings=128,
            rope_parameters=rope,
            pad_token_id=0,
        )
    )
    head = Eagle3Head(config)
    assert head.rotary.cos_sin(torch.arange(100), torch.float32)[0].shape == (100, 1, 8)


def head_for(target) -> HeadConfig:
    return HeadConfig.for_target(
        target, feature_layers=(2,), vocab_size=100, draft_vocab_size=10, max_position_embeddings=64
    )


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"hidden_size": 0}, "hidden_size of a head must be a whole number of at least 1, not 0"),
        ({"intermediate_size": 3.5}, "intermediate_size of a head must be a whole number"),
        ({"vocab_size": "128"}, "vocab_size of a head must be a whole number of at least 1, not '128'"),
        ({"num_attention_heads": True}, "not True"),
        ({"num_attention_heads": 3}, "3 attention heads cannot share 2 key/value heads"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"draft_vocab_size": 129}, "draft_vocab_size 129 exceeds the target's vocabulary of 128"),
        ({"feature_layers": ()}, "at least one feature layer"),
        ({"feature_layers": (2, 8)}, r"feature layer 8 is out of range for a target of 8 layers \(0\.\.7\)"),
        ({"feature_layers": (9,)}, "feature layer 9 is out of range"),
        ({"feature_layers": (-1,)}, "feature layer -1 is out of range"),
        ({"feature_layers": ("2",)}, "feature layer '2' is out of range"),
        ({"rope_parameters": {}}, "must name a rope_theta"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps of a head must be"),
        ({"fc_norm": "no"}, "fc_norm of a head must be true or false, not 'no'"),
    ],
)
def test_impossible_heads_are_refused(wrong, words):
    with pytest.raises(TercelError, match=words):
        tiny_head_config(**wrong)


def test_the_normed_hidden_can_be_the_residual():
    plain = tiny_head(tiny_head_config())
    other = Eagle3Head(tiny_head_config(norm_before_residual=True))
    other.load_state_dict(plain.state_dict())
    embedding, hidden = torch.randn(2, 16), torch.randn(2, 16)
    ours = other.project(embedding, hidden, torch.arange(2))
    plainly = plain.project(embedding, hidden, torch.arange(2))
    torch.testing.assert_close(ours.residual, rms(hidden, plain.midlayer.hidden_norm.weight))
    assert plainly.residual is hidden
    assert torch.equal(ours.query, plainly.query)


def test_features_can_be_normed_together():
    head = tiny_head(tiny_head_config(norm_before_fc=True))
    features = torch.randn(3, 48)
    wanted = rms(features, head.input_norm.weight) @ head.fc.weight.T
    torch.testing.assert_close(head.fuse(features), wanted)
    with pytest.raises(TercelError, match="not both"):
        tiny_head_config(norm_before_fc=True, fc_norm=True)


def test_projections_can_have_biases_which_start_at_zero():
    head = Eagle3Head(tiny_head_config(attention_bias=True))
    names = {name for name, _ in head.named_parameters() if name.endswith("bias")}
    assert names == {f"midlayer.self_attn.{p}_proj.bias" for p in "qkvo"}
    assert all(not p.any() for name, p in head.named_parameters() if name.endswith("bias"))


def test_a_head_of_the_targets_width_can_have_embeddings_of_its_own():
    assert tiny_head(tiny_head_config(own_embeddings=True)).embed_tokens.weight.shape == (128, 16)
    assert not hasattr(tiny_head(tiny_head_config()), "embed_tokens")


def test_further_layers_are_ordinary_ones_and_their_work_is_told():
    head = tiny_head(tiny_head_config(num_decoder_layers=3))
    c = head.config
    assert head.layers["1"].self_attn.q_proj.weight.shape == (c.num_attention_heads * c.head_dim, c.hidden_size)
    assert head.in_words() == "EAGLE-3 (3 decoder layers)"
    work, norms = head.work(), (4 + 2 * 2) * c.hidden_size
    assert work.drafted + work.fuse + norms == head.num_parameters()
    one = tiny_head(tiny_head_config()).work()
    assert (work.kv, work.context) == (3 * one.kv, 3 * one.context)
    with pytest.raises(TercelError, match="of the kind p-eagle has one decoder layer, not 2"):
        PEagleConfig(**{**vars(tiny_head_config()), "num_decoder_layers": 2})


def test_a_head_that_names_no_layers_takes_the_engines_default_of_its_target():
    loose = tiny_head_config(target_num_layers=None, feature_layers=())
    assert loose.num_features == 3
    assert Eagle3Head(loose).fc.in_features == 48
    assert loose.placed(30).feature_layers == (2, 15, 27)
    assert tiny_head_config(target_num_layers=None, feature_layers=(1, 9)).placed(10).target_num_layers == 10


def test_a_head_is_not_placed_beside_a_target_it_does_not_fit():
    with pytest.raises(TercelError, match="feature layer 9 is out of range for a target of 8 layers"):
        tiny_head_config(target_num_layers=None, feature_layers=(1, 9)).placed(8)
    with pytest.raises(TercelError, match="for a target of 8 layers, not of 9"):
        tiny_head_config().placed(9)
