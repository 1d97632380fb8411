"""Heads without an output layer: they draft with their target's, as the paper's text has it (section 3.1)."""

from __future__ import annotations

from dataclasses import replace

import torch

from tercel.draft import DraftModel
from tercel.target_model.protocol import TargetModel


@torch.no_grad()
def lend_output_layer(model: DraftModel, target: TargetModel) -> DraftModel:
    """`model` with the target's output rows of its draft vocabulary `[W, K]` as its own; as it is if it has an output
    layer, or is of other sizes than the target, which is for others to say."""
    return replace(model, head=model.head.beside(target, model.vocabulary.ids))
