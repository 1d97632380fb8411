"""Heads of all methods but EAGLE-3, with random weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tercel.decode.proposers import EAGLE, EAGLE2, HASS, MTP, P_EAGLE
from tercel.draft import DraftModel, DraftVocabulary, Eagle1Config, HeadConfig, HeadInfo
from tercel.draft.binding import bind
from tercel.draft.kinds import new_head
from tercel.methods.hydra import HydraConfig
from tercel.methods.last_hidden import PartsConfig
from tercel.methods.medusa import MedusaConfig
from tercel.methods.p_eagle.module import PEagleConfig
from tercel.target_model.protocol import TargetModel
from tests.methods.mtp_worlds import random_mtp

CONFIGS: dict[str, type[PartsConfig]] = {"medusa": MedusaConfig, "hydra": HydraConfig}


def random_parts(
    kind: str, target: TargetModel, *, pruned: bool = True, seed: int = 1, std: float = 0.2, **settings: Any
) -> DraftModel:
    """An untrained head, none of whose weights are as they begin; its drafts are nearly always wrong."""
    vocabulary = _vocabulary(target, pruned)
    return _random(CONFIGS[kind].beside(target, len(vocabulary), **{"num_parts": 4, **settings}), vocabulary, seed, std)


def random_eagle(target: TargetModel, *, pruned: bool = True, seed: int = 1, std: float = 0.2) -> DraftModel:
    """An untrained head of EAGLE, bound to its target."""
    vocabulary = _vocabulary(target, pruned)
    config = Eagle1Config.for_target(
        target.config,
        feature_layers=(target.num_layers,),
        vocab_size=target.vocab_size,
        draft_vocab_size=len(vocabulary),
        max_position_embeddings=256,
    )
    return bind(_random(config, vocabulary, seed, std), target)


def random_p_eagle(
    target: TargetModel, *, pruned: bool = True, seed: int = 1, std: float = 0.2, **settings: Any
) -> DraftModel:
    """An untrained head that drafts four positions in one forward."""
    vocabulary = _vocabulary(target, pruned)
    sizes = PEagleConfig.for_target(
        target.config,
        feature_layers=(0, target.num_layers // 2, target.num_layers - 1),
        vocab_size=target.vocab_size,
        draft_vocab_size=len(vocabulary),
        max_position_embeddings=target.context_length,
    )
    config = replace(sizes, **{"num_parts": 4, "tie_size": 8, **settings})
    return _random(config, vocabulary, seed, std)


def _vocabulary(target: TargetModel, pruned: bool) -> DraftVocabulary:
    size = target.vocab_size
    return DraftVocabulary(torch.arange(0, size, 2), size) if pruned else DraftVocabulary.full(size)


def _random(config: HeadConfig, vocabulary: DraftVocabulary, seed: int, std: float) -> DraftModel:
    head, generator = new_head(config), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(std * torch.randn(parameter.shape, generator=generator))
    return DraftModel(head.eval().requires_grad_(False), vocabulary, HeadInfo(None))


def random_head_of(method: str, target: TargetModel) -> DraftModel | None:
    """A head that the method drafts with; None for methods that this file has no heads for."""
    if method in (EAGLE, EAGLE2, HASS):
        return random_eagle(target)
    if method == P_EAGLE:
        return random_p_eagle(target)
    if method == MTP:
        return random_mtp(target)
    kind = next((kind for kind in CONFIGS if method.startswith(kind)), None)
    return None if kind is None else random_parts(kind, target)
