"""Heads without an output layer: they draft with their target's, as the paper's text has it (section 3.1)."""

from __future__ import annotations

from dataclasses import replace

import torch

from tercel.draft import DraftModel, Eagle3Head
from tercel.target_model.model import Target


@torch.no_grad()
def lend_output_layer(model: DraftModel, target: Target) -> DraftModel:
    """`model` with the target's output rows of its draft vocabulary `[W, K]` as its own; as it is if it has an output
    layer, or is of other sizes than the target, which is for others to say."""
    config = model.head.config
    sizes = (config.target_hidden_size, config.vocab_size)
    if not isinstance(model.head, Eagle3Head) or config.own_output or sizes != (target.hidden_size, target.vocab_size):
        return model
    head = Eagle3Head(replace(config, own_output=True))
    rows = target.output_layer.rows(model.vocabulary.ids)
    head.load_state_dict({**model.head.state_dict(), "lm_head.weight": rows})
    head = head.to(model.head.device, model.head.dtype).eval().requires_grad_(False)
    return replace(model, head=head)
