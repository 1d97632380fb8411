"""Folders that can be read but may be wrong: each doubt is said; and RoPE, which files keep in many places."""

from __future__ import annotations

import re

import pytest
import torch

from tercel.interop.formats.read import read_head
from tests.draft.heads_for_tests import tiny_draft
from tests.interop.foreign import (
    put,
    weights_of,
    write_angelslim,
    write_sglang,
    write_specforge,
    write_speculators,
)


def write_plain_half(model, folder):
    write_sglang(model, folder)
    put(folder, {name: value.half() for name, value in weights_of(model).items()})
    return folder


LONG = {"max_position_embeddings": 8192}
DOUBTS = [
    (lambda f: write_sglang(tiny_draft(**LONG), f, rope_theta=None), "names no rope_theta, so 10000 is taken"),
    (lambda f: write_sglang(tiny_draft(), f), "declares only 2,048 positions"),
    (
        lambda f: write_sglang(tiny_draft(), f, max_position_embeddings=None),
        "does not say its max_position_embeddings, which means only 2,048 positions",
    ),
    (
        lambda f: write_speculators(tiny_draft(**LONG, own_embeddings=True), f, norm_before_residual=None),
        "speculators means false, but vLLM takes true",  # config.py:43 against algos.py:33
    ),
    (
        lambda f: write_sglang(tiny_draft(**LONG), f, eagle_config={"norm_before_residual": True}),
        "said in eagle_config only, where no engine reads it",
    ),
    (lambda f: write_sglang(tiny_draft(**LONG), f, quantization_config={"quant_method": "fp8"}), "quantization_config"),
    (lambda f: write_sglang(tiny_draft(**LONG), f, tie_word_embeddings=True), "SGLang would take the embeddings for"),
    (lambda f: write_plain_half(tiny_draft(**LONG), f), "the weights are float16, which overflows on some targets"),
    (
        lambda f: write_sglang(tiny_draft(**LONG, fc_norm=True), f, fc_norm=None),
        "fc_norm.0.weight is there, but the config does not say fc_norm: taken as true",
    ),
    (
        lambda f: write_sglang(tiny_draft(**LONG, norm_before_fc=True), f, norm_before_fc=None),
        "input_norm.weight is there, but the config does not say norm_before_fc: taken as true",
    ),
    (
        lambda f: write_specforge(tiny_draft(**LONG), f, norm_output=False),
        "SpecForge's trainer .0.2. means by it whether lm_head sees the normed output at all",
    ),
    (
        lambda f: write_angelslim(tiny_draft(**LONG), f, rope_theta=1000000.0),
        "says rope_theta 1e.06, but AngelSlim's trainer .0.5. takes 10000 whatever it says",
    ),
    (
        lambda f: write_sglang(tiny_draft(**LONG), f, rope_scaling={"type": "mrope", "mrope_section": [2, 1, 1]}),
        "positions are multimodal .mrope.",
    ),
]


@pytest.mark.parametrize(("write", "words"), DOUBTS)
def test_doubts_are_said_once_and_alone(tmp_path, write, words):
    warnings = [w for w in read_head(write(tmp_path / "head"), num_layers=8).warnings if "aux_hidden" not in w]
    (warning,) = warnings
    assert re.search(words, warning), warning
    assert "\n" not in warning


def test_a_map_of_zeros_is_doubted(tmp_path):
    folder = write_sglang(tiny_draft(**LONG), tmp_path / "head")
    put(folder, {"d2t": torch.zeros(40, dtype=torch.long), "t2d": torch.arange(128) < 40})
    (warning,) = read_head(folder, num_layers=8).warnings
    assert "d2t is all zeros: the head drafts the first 40 tokens of the target" in warning


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope_theta": 500000.0}, {"rope_type": "default", "rope_theta": 500000.0}),
        (
            {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 7e4}},
            {"rope_type": "default", "rope_theta": 7e4},
        ),
        (
            {"rope_theta": None, "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 7e4}}},
            {"rope_type": "default", "rope_theta": 7e4},
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}},
            {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0},
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "default", "factor": None, "low_freq_factor": 1.0}},
            {"rope_type": "default", "rope_theta": 5e5},
        ),
    ],
)
def test_rope_is_found_wherever_it_stands(tmp_path, changes, expected):
    folder = write_sglang(tiny_draft(**LONG), tmp_path / "head", **changes)
    assert read_head(folder).head.config.rope_parameters == expected


def test_whose_norm_before_residual_is_left_out_is_read_as_its_maker_means_it(tmp_path):
    plain = read_head(write_sglang(tiny_draft(), tmp_path / "a"))
    other = read_head(write_speculators(tiny_draft(own_embeddings=True), tmp_path / "b", norm_before_residual=None))
    assert not plain.head.config.norm_before_residual
    assert not other.head.config.norm_before_residual
