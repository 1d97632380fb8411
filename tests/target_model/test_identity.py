"""A fingerprint tells weights and settings apart, but not how they were loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tercel.draft import DraftModel, HeadInfo, TargetIdentity
from tercel.draft.misfits import misfits
from tercel.heads import resolve_head
from tercel.interop.formats.read import read_head
from tercel.target_model.model import Target
from tercel.target_model.sources import Source
from tercel.train.feature_store import FeaturesOf
from tests.decode.drafts import random_draft
from tests.tiny import save_tiny, tiny_model, tiny_tokenizer

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}


def in_memory(arch: str = "llama", dtype: torch.dtype = torch.float32, seed: int = 0, **settings) -> Target:
    model = tiny_model(arch, seed, **settings).to(dtype)
    return Target(model, tiny_tokenizer(), Source("x", "x", "folder", None))


def extreme(folder: Path) -> Path:
    """A model with numbers that float16 turns into zeros, other numbers and its largest."""
    path = save_tiny(folder, "llama")
    tensors = load_file(path / "model.safetensors")
    for name, tensor in tensors.items():
        if "mlp" in name:
            tensor.flatten()[::3] *= 1e-9
            tensor.flatten()[1::5] = 1.00390625 * 2.0**-16  # kept by bfloat16, not by float16
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.mark.parametrize("arch", ["llama", "gpt2", "gemma3"])
def test_the_dtype_loaded_does_not_matter(tmp_path: Path, arch: str):
    path = extreme(tmp_path) if arch == "llama" else save_tiny(tmp_path, arch)
    loaded = [Target.load(str(path), dtype=dtype) for dtype in DTYPES]
    assert len({target.fingerprint for target in loaded}) == 1
    assert loaded[0].fingerprint.startswith("2-")
    # of the first scheme too, so that heads recorded under it serve in float16
    first = Target(loaded[0].model, None, Source("x", "x", "folder", None))._first_fingerprint
    assert all(target.is_recorded_as(first) for target in loaded)


def test_a_model_in_memory_and_its_files_are_one(tmp_path: Path):
    assert in_memory().fingerprint == Target.load(str(save_tiny(tmp_path, "llama"))).fingerprint


def test_shards_are_one_model(tmp_path: Path):
    tiny_model("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    tiny_tokenizer().save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors.index.json").is_file()
    save_file({"other": torch.ones(3)}, tmp_path / "consolidated.safetensors")  # which nothing reads
    assert Target.load(str(tmp_path)).fingerprint == in_memory().fingerprint


@pytest.mark.parametrize(
    ("arch", "settings"),
    [
        ("llama", {"rope_parameters": YARN}),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
        ("llama", {"rms_norm_eps": 1e-3}),
        ("llama", {"hidden_act": "gelu"}),
        ("mistral", {"sliding_window": 16}),
        ("gemma2", {"attn_logit_softcapping": 20.0}),
        ("gemma3", {"final_logit_softcapping": 30.0}),
        ("granite", {"residual_multiplier": 0.5}),
        ("mixtral", {"num_experts_per_tok": 1}),
    ],
)
def test_settings_that_change_outputs_change_it(arch: str, settings: dict):
    assert in_memory(arch, **settings).fingerprint != in_memory(arch).fingerprint


def test_other_weights_change_it():
    assert in_memory(seed=1).fingerprint != in_memory().fingerprint


@pytest.mark.parametrize(
    "settings",
    [
        {"use_cache": False},
        {"eos_token_id": [3, 5]},
        {"attention_dropout": 0.1},
        {"max_position_embeddings": 128},  # without scaled RoPE only a limit
        {"torch_dtype": "bfloat16"},
        {"left_by_another_tool": 3},
    ],
)
def test_what_changes_no_output_does_not(settings: dict):
    plain = in_memory()
    for key, value in settings.items():
        setattr(plain.config, key, value)
    assert plain.fingerprint == in_memory().fingerprint


def test_a_whole_number_is_the_same_as_a_decimal_one():
    one, other = in_memory(), in_memory()
    one.config.rope_parameters = {"rope_type": "default", "rope_theta": 20000}
    other.config.rope_parameters = {"rope_type": "default", "rope_theta": 20000.0}
    assert one.fingerprint == other.fingerprint


def test_heads_of_either_scheme_fit_and_others_do_not():
    target = in_memory()
    draft = random_draft(target)

    def recorded(weights: str) -> DraftModel:
        info = HeadInfo(TargetIdentity("x", weights, target.tokenizer_digest))
        return DraftModel(draft.head, draft.vocabulary, info)

    assert misfits(recorded(target.fingerprint), target) == ()
    assert misfits(recorded(target._first_fingerprint), target) == ()
    for weights in ("2-0123456789abcdef", "0123456789abcdef", in_memory(rms_norm_eps=1e-3).fingerprint):
        (found,) = misfits(recorded(weights), target)
        assert (found.what, found.severity) == ("weights", "warn")


def test_features_are_not_taken_for_those_of_other_settings():
    one, other = (FeaturesOf.those(target, (1, 2), "bf16") for target in (in_memory(), in_memory(rope_parameters=YARN)))
    assert "of a target with other weights or settings" in one.misfit(other)


@pytest.mark.real
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_shipped_head_serves_the_default_target_in_every_dtype(dtype: torch.dtype):
    target = Target.load("smollm2-135m", dtype=dtype)
    head = read_head(resolve_head(None, "smollm2-135m"))
    assert head.info.target is not None
    assert head.info.target.weights == target.fingerprint
    assert target.is_recorded_as("ed314013dab6f452")  # as it was recorded first
    assert misfits(head, target) == ()
