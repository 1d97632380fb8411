"""Flags and the settings they stand for have the same names and defaults."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from tercel.cli.models import tree_shape
from tercel.cli.options import DraftKind, DraftOptions, SamplingOptions, parse_logit_bias
from tercel.cli.train import TrainFlags, parse_layers
from tercel.decode.sampling import SamplingParams
from tercel.draft.shape import CHAIN_DEPTH, TreeShape
from tercel.errors import TercelError
from tercel.train.config import TrainConfig


def test_training_flags_are_the_settings_of_training() -> None:
    assert [f.name for f in fields(TrainFlags)] == [f.name for f in fields(TrainConfig)]
    assert TrainFlags().config() == TrainConfig()


def test_sampling_flags_are_the_settings_of_sampling() -> None:
    assert SamplingOptions().asked().params == SamplingParams()
    ours = SamplingOptions(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, seed=3, stop=["a", "b"], logit_bias=["4=-1"])
    expected = SamplingParams(
        temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, seed=3, stop=("a", "b"), logit_bias={4: -1.0}
    )
    assert ours.asked().params == expected


def test_draft_flags_are_the_shape_of_the_tree() -> None:
    cpu = torch.device("cpu")
    assert tree_shape(DraftOptions(), cpu) == TreeShape.for_device(cpu)
    assert tree_shape(DraftOptions(), torch.device("cuda")) == TreeShape(10, 8, 60)  # the paper's
    assert tree_shape(DraftOptions(draft=DraftKind.chain), cpu) == TreeShape.chain(CHAIN_DEPTH)
    assert tree_shape(DraftOptions(draft=DraftKind.chain, draft_depth=2), cpu) == TreeShape.chain(2)
    assert tree_shape(DraftOptions(draft_top_k=3, draft_depth=2, draft_nodes=9), cpu) == TreeShape(3, 2, 9)


def test_lists_in_flags() -> None:
    assert parse_layers("2,15, 27") == (2, 15, 27)
    assert parse_layers("") == ()
    assert parse_logit_bias(["1=2", "3=-1e2"]) == {1: 2.0, 3: -100.0}
    for wrong in ("x=1", "1", "1=", "=2"):
        with pytest.raises(TercelError, match="ID=VALUE"):
            parse_logit_bias([wrong])
