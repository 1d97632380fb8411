"""Greedy chains of a head, read in one way or another, on answers of the target, without decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from tercel.chat import TokenizedChat
from tercel.draft import DraftModel, DraftVocabulary
from tercel.target_model.protocol import TargetModel
from tercel.train.acceptance import Chains, chains_of
from tercel.train.config import Objective
from tercel.train.features import FeatureSupply
from tercel.train.ttt import training_time_test


@torch.no_grad()
def greedy_chains(model: DraftModel, target: TargetModel, answers: Sequence[TokenizedChat], depth: int) -> list[Chains]:
    """Chains of `depth` drafts on `answers`, texts that the target itself chose. Answers too short for a draft are
    left out."""
    supply = FeatureSupply(target, model.eagle3, model.vocabulary)
    found: list[Chains] = []
    for answer in answers:
        batch = supply.batch([answer])
        result = training_time_test(model.eagle3, batch, supply.to_draft, Objective(steps=depth))
        found += chains_of(result, batch, supply.to_draft)
    return found


def read_as(model: DraftModel, **settings: object) -> DraftModel:
    """The same weights under other settings (`feature_layers`, `norm_before_residual`, `rope_parameters`, …)."""
    config = replace(model.head.config, **settings)  # type: ignore[arg-type]
    return replace(model, head=model.head.rebuilt(config))


def without_map(model: DraftModel) -> DraftModel:
    """The head as a loader without d2t takes it: draft id `i` is token `i`."""
    vocabulary = DraftVocabulary(torch.arange(len(model.vocabulary)), model.vocabulary.target_size)
    return replace(model, vocabulary=vocabulary)
