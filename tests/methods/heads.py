"""Medusa's and Hydra's heads with random weights."""

from __future__ import annotations

from typing import Any

import torch

from tercel.draft import DraftModel, DraftVocabulary, HeadInfo
from tercel.draft.kinds import new_head
from tercel.methods.hydra import HydraConfig
from tercel.methods.last_hidden import LastHiddenConfig, LastHiddenHead
from tercel.methods.medusa import MedusaConfig
from tercel.target_model.protocol import TargetModel

CONFIGS: dict[str, type[LastHiddenConfig]] = {"medusa": MedusaConfig, "hydra": HydraConfig}


def random_parts(
    kind: str, target: TargetModel, *, pruned: bool = True, seed: int = 1, std: float = 0.2, **settings: Any
) -> DraftModel:
    """An untrained head, none of whose weights are as they begin; its drafts are nearly always wrong."""
    size = target.vocab_size
    vocabulary = DraftVocabulary(torch.arange(0, size, 2), size) if pruned else DraftVocabulary.full(size)
    head = new_head(CONFIGS[kind].beside(target, len(vocabulary), **{"num_parts": 4, **settings}))
    assert isinstance(head, LastHiddenHead)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(std * torch.randn(parameter.shape, generator=generator))
    return DraftModel(head.eval().requires_grad_(False), vocabulary, HeadInfo(None))
