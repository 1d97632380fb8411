"""Folders that are wrong, contradict themselves, or hold another kind of draft; and those that are only doubtful."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tercel.errors import TercelError
from tercel.interop.formats.eagle1 import is_eagle1
from tercel.interop.formats.read import read_head
from tests.draft.heads_for_tests import tiny_draft
from tests.interop.foreign import (
    LIST,
    WRITERS,
    edit,
    put,
    weights_of,
    write_eagle1,
    write_modelopt,
    write_sglang,
    write_speculators,
)


def reading(folder, words, **options):
    with pytest.raises(TercelError, match=words) as caught:
        read_head(folder, **options)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


CONFIGS = [
    # sizes and vocabularies mixed up
    ({"vocab_size": 40, "draft_vocab_size": 128}, "lm_head.weight in .* has 40 rows: the two are exchanged"),
    ({"vocab_size": 40}, r"t2d in .* is \[128\], .* says vocab_size 40 \(the draft's 40, it seems\)"),
    ({"draft_vocab_size": 128}, "lm_head.weight in .* has 40 rows, but .* says draft_vocab_size 128"),
    ({"draft_vocab_size": None}, "lm_head.weight in .* has 40 rows, but .* has no draft_vocab_size beside 128"),
    ({"draft_vocab_size": "40"}, "draft_vocab_size in .* must be a whole number of at least 1, not '40'"),
    ({"vocab_size": None}, "config.json has no vocab_size"),
    ({"vocab_size": 200}, r"t2d in .* is \[128\], with a row for each token of the target, .* says vocab_size 200"),
    ({"hidden_size": 24}, "fc.weight in .* has 16 rows, but .* says hidden_size 24"),
    ({"hidden_size": None}, "config.json has no hidden_size"),
    ({"hidden_size": True}, "hidden_size in .* must be a whole number"),
    ({"target_hidden_size": 20}, "takes 48 columns, which is not a multiple of the target's width 20"),
    ({"target_hidden_size": 24}, "takes 48 = 2 x 24 columns, but .* lists no layers, which means three"),
    ({"intermediate_size": 32}, r"mlp.\w+_proj.weight in .* but the head's sizes ask for .*config and weights are of"),
    ({"num_attention_heads": 8}, "q_proj.weight in .* but the head's sizes ask for"),
    ({"num_key_value_heads": None}, "k_proj.weight in .* but the head's sizes ask for"),
    ({"num_key_value_heads": 3}, "config.json: 4 attention heads cannot share 3"),
    ({"head_dim": None}, "has no head_dim, which means 16 // 4 = 4, but q_proj .* has 32 rows: add head_dim 8"),
    ({"rms_norm_eps": "small"}, "config.json: rms_norm_eps of a head must be a small positive number"),
    # layers of another kind
    ({"num_hidden_layers": 2}, "says num_hidden_layers 2, but .* holds tensors of 1; config and weights are"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu', but tercel takes EAGLE-3 heads with silu"),
    ({"use_sliding_window": True}, "attends within a sliding window"),
    ({"layer_types": ["sliding_attention"]}, "attends within a sliding window"),
    ({"mlp_bias": True}, "says mlp_bias true, but .* holds no such bias"),
    ({"attention_bias": True}, "says attention_bias true, but midlayer.self_attn.q_proj.bias is missing"),
    # RoPE
    ({"rope_parameters": {"rope_theta": 5e5}}, r"names two values of rope_theta, 10000.0 and 500000.0"),
    (
        {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "llama3"}},
        "names two values of RoPE type, llama3 and default",
    ),
    ({"rope_theta": "big"}, "rope_theta in .* must be a number above 0, not 'big'"),
    ({"rope_theta": -1}, "rope_theta in .* must be a number above 0, not -1"),
    ({"rope_scaling": {"rope_type": "spiral"}}, "describes a head that cannot be built"),
    ({"rope_scaling": [1]}, "rope_scaling in .* must be an object"),
    ({"partial_rotary_factor": 0.5}, "says partial_rotary_factor 0.5, but an EAGLE-3 head here rotates whole heads"),
    # flags
    ({"fc_norm": True}, "says fc_norm true, but fc_norm.0.weight is missing in model.safetensors"),
    ({"norm_before_fc": True}, "says norm_before_fc true, but input_norm.weight is missing"),
    ({"norm_output": "yes"}, "norm_output in .* must be true or false, not 'yes'"),
    (
        {"norm_before_fc": True, "eagle_config": {"norm_before_fc": False}},
        "says norm_before_fc true in config.json but norm_before_fc false in eagle_config; remove the wrong one",
    ),
    ({"eagle_config": 3}, "eagle_config in .* must be an object, not 3"),
    # other kinds of drafts
    ({"architectures": ["PEagleDraftModel"]}, r"describes a P-EAGLE head, .* \(PEagleDraftModel\)"),
    ({"architectures": ["DFlashDraftModel"]}, "describes a DFlash draft"),
    ({"architectures": ["Qwen3DSparkModel"]}, "describes a DSpark draft"),
    ({"dflash_config": {"mask_token_id": 1}}, "describes a DFlash draft"),
    ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, r"multi-head latent attention \(MLA\)"),
    ({"model_type": "kimi_k2"}, r"multi-head latent attention \(MLA\) \(kimi_k2\)"),
    ({"parallel_drafting": True}, "drafts in parallel, as P-EAGLE does"),
    ({"architectures": "LlamaForCausalLMEagle3"}, "architectures in .* must be a list of names"),
]


@pytest.mark.parametrize(("changes", "words"), CONFIGS)
def test_a_wrong_config_is_named(tmp_path, changes, words):
    reading(write_sglang(tiny_draft(), tmp_path / "head", **changes), words)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)
CONFIG_KEYS = (
    *("architectures", "model_type", "hidden_size", "target_hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size", "draft_vocab_size", "rms_norm_eps"),
    *("max_position_embeddings", "rope_theta", "rope_scaling", "rope_parameters", "eagle_config", "fc_norm", LIST),
    *("norm_output", "norm_before_fc", "norm_before_residual", "attention_bias", "mlp_bias", "hidden_act"),
    *("num_aux_hidden_states", "aux_hidden_states_layer_ids", "quantization_config", "layer_types", "dflash_config"),
    *("speculators_model_type", "speculators_config", "transformer_layer_config", "parallel_drafting"),
)


@pytest.fixture(scope="module")
def folder_to_spoil(tmp_path_factory):
    return write_sglang(tiny_draft(), tmp_path_factory.mktemp("heads") / "head")


@settings(max_examples=80, deadline=None)
@given(st.dictionaries(st.sampled_from(CONFIG_KEYS), JSON, min_size=1, max_size=2), st.sampled_from([None, 8]))
def test_no_config_gives_anything_but_a_head_or_a_sentence(folder_to_spoil, changes, depth):
    whole = (folder_to_spoil / "config.json").read_text()
    try:
        edit(folder_to_spoil, lambda config: config.update(changes))
        read_head(folder_to_spoil, num_layers=depth)
    except TercelError:
        pass
    finally:
        (folder_to_spoil / "config.json").write_text(whole)


TENSORS = [
    ({"d2t": None}, "drafts 40 of 128 tokens but has no map d2t"),
    ({"t2d": torch.ones(128, dtype=torch.bool)}, "maps d2t and t2d that contradict each other"),
    ({"d2t": torch.zeros(5, dtype=torch.long), "t2d": None}, "d2t has 5 rows but the head's lm_head has 40"),
    ({"d2t": torch.full((40,), 100), "t2d": None}, "names token 139, but the target has 128 tokens"),
    ({"d2t": torch.zeros(40)}, "d2t holds float32 numbers, not whole offsets"),
    ({"fc.weight": None}, "holds no matrix fc.weight"),
    ({"fc.weight": torch.ones(48)}, "holds no matrix fc.weight"),
    ({"lm_head.weight": torch.ones(40)}, r"lm_head.weight in .* is \[40\], but it must be a matrix"),
    ({"lm_head.weight": torch.ones(39, 16)}, "lm_head.weight in .* has 39 rows, but .* says draft_vocab_size 40"),
    ({"norm.weight": None}, "lacks norm.weight .1 tensors missing in all"),
    ({"midlayer.hidden_norm.weight": torch.ones(5)}, r"hidden_norm.weight in .* is \[5\]"),
    ({"fc.weight": torch.full((16, 48), float("nan"))}, "fc.weight in .* holds NaN or infinite numbers"),
    ({"lm_head.weight": torch.full((40, 16), float("inf"))}, "lm_head.weight in .* holds NaN or infinite numbers"),
    ({"midlayer.extra.weight": torch.ones(2)}, "holds midlayer.extra.weight, which no head of EAGLE-3 has"),
    ({"model.norm.weight": torch.ones(16)}, r"holds both \S+ and \S+, which mean the same tensor"),
    ({"layers.0.self_attn.q_proj.weight": torch.ones(2, 2)}, "which mean the same tensor"),
    ({"embed_tokens.weight": torch.ones(40, 16)}, r"embed_tokens.weight in .* is \[40, 16\], .* says vocab_size 128"),
    # other kinds of heads
    ({"layers.1.mlp.up_proj.weight": torch.ones(2, 2)}, "says num_hidden_layers 1, but .* holds tensors of 2"),
    ({"midlayer.self_attn.q_norm.weight": torch.ones(8)}, r"norms its queries and keys .*self_attn.q_norm.weight"),
    ({"midlayer.self_attn.kv_a_proj_with_mqa.weight": torch.ones(2, 2)}, "multi-head latent attention"),
    ({"mask_hidden": torch.ones(48)}, "drafts in parallel, as P-EAGLE does .mask_hidden"),
    ({"parallel_draft_heads.0.medusa_layers.0.linear.weight": torch.ones(2, 2)}, "drafts in parallel"),
    ({"midlayer.mlp.experts.0.up_proj.weight": torch.ones(2, 2)}, "mixture of experts"),
    ({"fc.bias": torch.ones(16)}, "a head whose fc has a bias"),
    # quantised weights
    ({"midlayer.mlp.up_proj.weight": torch.ones(24, 16, dtype=torch.int8)}, "holds quantised weights .*int8"),
    ({"lm_head.weight": torch.ones(40, 16).to(torch.float8_e4m3fn)}, "holds quantised weights .*float8_e4m3fn"),
    ({"midlayer.mlp.up_proj.weight_scale": torch.ones(1)}, r"holds quantised weights \(midlayer.mlp.up_proj.weight_sc"),
]


@pytest.mark.parametrize(("values", "words"), TENSORS)
def test_wrong_tensors_are_named(tmp_path, values, words):
    folder = write_sglang(tiny_draft(), tmp_path / "head")
    put(folder, values)
    reading(folder, words)


def test_a_map_of_target_ids_instead_of_offsets(tmp_path):
    model = tiny_draft()
    folder = write_sglang(model, tmp_path / "head")
    put(folder, {"d2t": model.vocabulary.ids.clone()})
    reading(folder, "d2t in .* holds ids of the target's tokens, not what to add to a draft id.*subtract 0, 1, 2")


@pytest.mark.parametrize(("flag", "tensor"), [("fc_norm", "fc_norm.0.weight"), ("norm_before_fc", "input_norm.weight")])
def test_norms_that_the_config_denies(tmp_path, flag, tensor):
    folder = write_sglang(tiny_draft(**{flag: True}), tmp_path / "head", **{flag: False})
    reading(folder, f"says {flag} false, but {tensor} is there in model.safetensors")


def test_a_narrower_head_needs_embeddings(tmp_path):
    folder = write_sglang(tiny_draft(hidden_size=24), tmp_path / "head")
    put(folder, {"embed_tokens.weight": None})
    reading(folder, "hidden_size 24 beside target_hidden_size 16, so the head needs embeddings of its own")


def test_forgotten_target_width(tmp_path):
    folder = write_sglang(tiny_draft(hidden_size=32), tmp_path / "head", target_hidden_size=None)
    reading(folder, "takes 48 columns, which is not a multiple of the target's width 32 .hidden_size in .*is target_hi")


def test_speculators_of_other_kinds(tmp_path):
    model = tiny_draft(own_embeddings=True)
    reading(write_speculators(model, tmp_path / "a", speculators_model_type="peagle"), "describes a P-EAGLE head")
    reading(write_speculators(model, tmp_path / "b", speculators_model_type="mlp"), "a draft of the kind 'mlp'")
    reading(write_speculators(model, tmp_path / "c", transformer_layer_config=None), "has no transformer_layer_config")
    folder = write_speculators(model, tmp_path / "d")
    edit(folder, lambda config: config["transformer_layer_config"].update(model_type="qwen3"))
    reading(folder, "describes a Qwen3 layer, which norms queries and keys, but .* holds no q_norm")
    # speculators makes embeddings of NaN until they are loaded (model.py:74-75)
    folder = write_speculators(model, tmp_path / "e")
    put(folder, {"embed_tokens.weight": torch.full((128, 16), float("nan"))})
    reading(folder, "embed_tokens.weight in .* holds NaN")


def test_modelopt_of_other_kinds(tmp_path):
    for name, value, words in (
        ("parallel_draft_step", 4, r"drafts in parallel \(parallel_draft_step 4\)"),
        ("use_aux_hidden_state", False, "says use_aux_hidden_state false: the head reads the last hidden state alone"),
    ):
        folder = write_modelopt(tiny_draft(), tmp_path / name)
        edit(folder, lambda config, name=name, value=value: config["eagle_config"].update({name: value}))
        reading(folder, words)


def test_a_whole_language_model(tmp_path):
    folder = write_sglang(tiny_draft(), tmp_path / "head")
    names = [f"model.layers.{i}.self_attn.q_proj.weight" for i in range(3)] + ["model.embed_tokens.weight"]
    save_file({name: torch.ones(2, 2) for name in names}, folder / "model.safetensors")
    reading(folder, "holds a whole language model, not a draft head")


class TestEagle1:
    @pytest.mark.parametrize("prefix", ["", "model.", "ea_layer."])
    def test_is_recognised(self, tmp_path, prefix):
        folder = write_eagle1(tiny_draft(), tmp_path / "head", prefix)
        assert is_eagle1(torch.load(folder / "pytorch_model.bin", weights_only=True))

    @pytest.mark.parametrize("style", WRITERS)
    def test_no_eagle3_head_is_one(self, tmp_path, style):
        folder = WRITERS[style](tiny_draft(own_embeddings=True), tmp_path / "head")
        assert not is_eagle1(load_file(folder / "model.safetensors"))

    def test_nor_one_of_two_layers(self):
        # its fc, too, is [H, 2H]
        two = tiny_draft(feature_layers=(3, 5), own_embeddings=True)
        tensors = {name.replace("midlayer.", "layers.0."): value for name, value in weights_of(two).items()}
        assert tensors["fc.weight"].shape == (16, 32)
        assert not is_eagle1(tensors)
