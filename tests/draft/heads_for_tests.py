"""Tiny heads with weights that matter."""

from __future__ import annotations

from typing import Any

import torch

from tercel.draft import (
    DraftModel,
    DraftVocabulary,
    Eagle3Head,
    HeadConfig,
    HeadInfo,
    MeasuredRecord,
    TargetIdentity,
    TrainingRecord,
)
from tests.tiny import VOCAB


def tiny_head_config(**overrides: Any) -> HeadConfig:
    values: dict[str, Any] = {
        "hidden_size": 16,
        "target_hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCAB,
        "draft_vocab_size": 40,
        "target_num_layers": 8,
        "feature_layers": (2, 4, 5),
    }
    return HeadConfig(**{**values, **overrides})


def tiny_head(config: HeadConfig, seed: int = 0, std: float = 0.15) -> Eagle3Head:
    """Random matrices of deviation `std`, norms off their neutral 1."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = Eagle3Head(config)
        head.initialise(std)
        with torch.no_grad():
            for parameter in head.parameters():
                if parameter.ndim == 1:
                    parameter.add_(0.2 * torch.randn_like(parameter))
    return head


def some_vocabulary(size: int, seed: int = 0, target_size: int = VOCAB) -> DraftVocabulary:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randperm(target_size, generator=generator)[:size].sort().values
    return DraftVocabulary(ids, target_size)


def tiny_draft(**overrides: Any) -> DraftModel:
    config = tiny_head_config(**overrides)
    training, measured = TrainingRecord(data=("a",), steps=3), MeasuredRecord.of({"tau": 2.5})
    info = HeadInfo(TargetIdentity("tiny", "w", "t"), training, measured)
    return DraftModel(tiny_head(config), some_vocabulary(config.draft_vocab_size), info)
