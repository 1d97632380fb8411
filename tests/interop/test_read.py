"""A head written in every maker's style comes back with the same weights, configuration and draft logits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from tercel.draft import DraftModel, DraftVocabulary, Eagle3Head, HeadInfo, save_head
from tercel.draft.layers import Projected
from tercel.errors import TercelError
from tercel.interop.formats.read import read_head
from tests.draft.heads_for_tests import tiny_draft, tiny_head, tiny_head_config
from tests.interop.foreign import WRITERS, put, write_sglang, write_speculators


def draft_logits(head: Eagle3Head, features: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
    """features `[T, n*Ht]`, embeddings `[T, H]` to two steps of logits `[2, T, W]`, all rows attending causally."""
    hidden, steps = head.fuse(features), []
    positions = torch.arange(len(features))

    def causally(layer: int, now: Projected) -> tuple[torch.Tensor, torch.Tensor]:
        query, key, value = (x.transpose(0, 1)[None] for x in (now.query, now.key, now.value))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return now.residual, attended[0].transpose(0, 1).flatten(1)

    for _ in range(2):
        output = head.step(head.project(embeddings, hidden, positions), positions, causally)
        steps.append(head.logits(output))
        hidden = head.feedback(output)
    return torch.stack(steps)


def assert_same(back: DraftModel, model: DraftModel, dtype: torch.dtype = torch.float32) -> None:
    assert back.head.config == model.head.config
    assert torch.equal(back.vocabulary.ids, model.vocabulary.ids)
    assert back.vocabulary.target_size == model.vocabulary.target_size
    for (name, theirs), (other, ours) in zip(
        back.head.named_parameters(), model.head.named_parameters(), strict=True
    ):
        assert name == other
        assert torch.equal(theirs, ours.to(dtype).float()), name
        assert not theirs.requires_grad
    if dtype is torch.float32:
        c = model.head.config
        generator = torch.Generator().manual_seed(3)
        features = torch.randn(7, c.num_features * c.target_hidden_size, generator=generator)
        embeddings = torch.randn(7, c.hidden_size, generator=generator)
        assert torch.equal(
            draft_logits(back.head, features, embeddings), draft_logits(model.head, features, embeddings)
        )


def valued(model: DraftModel, name: str) -> str:
    return next(c.value for c in model.conventions if c.name == name)


STYLES = [
    ("speculators", {"num_decoder_layers": 2}),
    ("sglang", {}),
    ("sglang", {"fc_norm": True, "norm_output": True}),
    ("sglang", {"hidden_size": 24}),
    ("sglang", {"attention_bias": True, "norm_before_fc": True, "norm_before_residual": True}),
    ("specforge", {}),
    ("specforge", {"feature_layers": (2, 3, 6)}),
    ("speculators", {"own_embeddings": True}),
    ("speculators", {"own_embeddings": True, "norm_before_residual": True}),
    ("speculators", {"own_embeddings": True, "norm_before_fc": True, "norm_output": True}),
    ("speculators", {"own_embeddings": True, "fc_norm": True, "feature_layers": (1, 3, 5, 6)}),
    ("speculators", {"own_embeddings": True, "attention_bias": True}),
    ("modelopt", {}),
    ("modelopt", {"feature_layers": (2, 3, 6)}),
    ("angelslim", {}),
    ("angelslim", {"feature_layers": (3, 5, 6)}),
]


@pytest.mark.parametrize(("style", "flags"), STYLES)
def test_every_style_comes_back(tmp_path, style, flags):
    model = tiny_draft(**flags)
    folder = WRITERS[style](model, tmp_path / "head")
    back = read_head(folder, num_layers=8)
    assert back.format == style
    assert back.path == folder
    assert_same(back, model, torch.bfloat16 if style == "specforge" else torch.float32)
    assert back.info.target is None
    assert back.info.training.made_by == style
    assert valued(back, "format") == style
    assert all(c.name and c.value and c.source for c in back.conventions)


@pytest.mark.parametrize("style", WRITERS)
def test_a_whole_vocabulary_needs_no_map(tmp_path, style):
    # speculators registers neither map then (model.py:48-55), ModelOpt no d2t (modeling_eagle.py:50-51)
    model = tiny_draft(draft_vocab_size=128, own_embeddings=style == "speculators")
    model = replace(model, vocabulary=DraftVocabulary.full(128))
    folder = WRITERS[style](model, tmp_path / "head")
    assert not read_head(folder).vocabulary.pruned


@pytest.mark.parametrize("value", [True, False])
def test_maps_as_trainers_leave_them_for_a_whole_vocabulary(tmp_path, value):
    # SpecForge makes t2d all true (llama3_eagle.py:1696), AngelSlim all false (llama_eagle3.py:559)
    model = replace(tiny_draft(draft_vocab_size=128), vocabulary=DraftVocabulary.full(128))
    folder = write_sglang(model, tmp_path / "head")
    put(folder, {"t2d": torch.full((128,), value)})
    assert read_head(folder).vocabulary.ids.tolist() == list(range(128))


@pytest.mark.parametrize("prefix", ["model.", "draft_model.", "module.", "eagle_module."])
def test_prefixes_do_not_matter(tmp_path, prefix):
    # vLLM and SGLang put "model." before the names themselves
    model = tiny_draft()
    folder = write_sglang(model, tmp_path / "head")
    tensors = load_file(folder / "model.safetensors")
    save_file({prefix + name: value for name, value in tensors.items()}, folder / "model.safetensors")
    assert_same(read_head(folder, num_layers=8), model)


def test_older_names_of_the_norms_before_fc(tmp_path):
    # SGLang still maps them (llama_eagle3.py, legacy_name_map) and reads use_aux_norm
    model = tiny_draft(fc_norm=True)
    folder = write_sglang(model, tmp_path / "head", fc_norm=None, use_aux_norm=True)
    tensors = load_file(folder / "model.safetensors")
    for i, name in enumerate(("low", "mid", "high")):
        tensors[f"aux_norm_{name}.weight"] = tensors.pop(f"fc_norm.{i}.weight")
    save_file(tensors, folder / "model.safetensors")
    assert_same(read_head(folder, num_layers=8), model)


def test_tensors_that_nothing_needs_are_left_out_and_named(tmp_path):
    folder = write_speculators(tiny_draft(own_embeddings=True), tmp_path / "head")
    extra = {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4), "verifier_norm.weight": torch.ones(16)}
    put(folder, extra)
    left_out = valued(read_head(folder), "tensors left out")
    assert left_out == "layers.0.self_attn.rotary_emb.inv_freq, verifier_norm.weight"


def test_the_verifier_is_kept_by_name(tmp_path):
    folder = write_speculators(tiny_draft(own_embeddings=True), tmp_path / "head")
    training = read_head(folder).info.training
    assert (training.made_by, training.target_name) == ("speculators", "someone/target")


@pytest.mark.parametrize(("learns", "found"), [(True, "trained"), (False, "frozen"), (None, None)])
def test_whether_embeddings_learned_with_the_head(tmp_path, learns, found):
    # embed_requires_grad of speculators' Eagle3SpeculatorConfig; other makers do not say it
    folder = write_speculators(tiny_draft(own_embeddings=True), tmp_path / "head", embed_requires_grad=learns)
    assert read_head(folder).info.training.embeddings == found


def test_without_the_targets_depth_the_default_layers_stay_open(tmp_path):
    folder = write_sglang(tiny_draft(), tmp_path / "head")
    open_ = read_head(folder)
    assert open_.head.config.feature_layers == ()
    assert open_.head.config.target_num_layers is None
    assert valued(open_, "layer ids") == "inputs 2, L//2, L-3 of L layers"
    assert valued(read_head(folder, num_layers=8), "layer ids") == "inputs 2, 4, 5 of 8 layers"
    assert valued(open_, "vocabulary") == "offsets: d2t[i] + i is the target's id"
    assert open_.head.config.placed(8) == read_head(folder, num_layers=8).head.config


def test_dtype_and_eval_mode(tmp_path):
    back = read_head(write_sglang(tiny_draft(), tmp_path / "head"), dtype=torch.bfloat16)
    assert back.head.dtype is torch.bfloat16
    assert not back.head.training


def test_a_clean_head_is_not_doubted(tmp_path):
    model = tiny_draft(max_position_embeddings=8192)
    for style in ("sglang", "specforge", "modelopt", "angelslim"):
        assert read_head(WRITERS[style](model, tmp_path / style), num_layers=8).warnings == ()
    model = tiny_draft(max_position_embeddings=8192, own_embeddings=True)
    assert read_head(write_speculators(model, tmp_path / "speculators"), num_layers=8).warnings == ()


class TestOwnHeads:
    def test_come_back_as_load_head_gives_them(self, tmp_path):
        model = tiny_draft()
        save_head(model, tmp_path / "head", dtype=torch.float32)
        back = read_head(tmp_path / "head", num_layers=8)
        assert_same(back, model)
        assert back.info == model.info
        assert (back.format, back.conventions) == ("tercel", ())

    def test_are_placed_where_their_files_leave_it_open(self, tmp_path):
        config = tiny_head_config(target_num_layers=None, feature_layers=())
        model = DraftModel(tiny_head(config), tiny_draft().vocabulary, HeadInfo(None))
        save_head(model, tmp_path / "head")
        assert read_head(tmp_path / "head", num_layers=10).head.config.feature_layers == (2, 5, 7)

    def test_say_what_their_ids_mean(self, tmp_path):
        save_head(tiny_draft(), tmp_path / "head")
        with pytest.raises(TercelError, match="leave layer-ids out"):
            read_head(tmp_path / "head", layer_ids="output")
