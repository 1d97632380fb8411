"""A head beside the target that it drafts for: the one way in which the two come together."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tercel.draft.checkpoint import Convention, DraftModel
from tercel.draft.misfits import KnownTarget, check_fits

if TYPE_CHECKING:
    from tercel.target_model.protocol import TargetModel


@torch.no_grad()
def bind(model: DraftModel, target: TargetModel) -> DraftModel:
    """`model` as it runs and learns beside `target`: `fitted`, embeddings that only repeat the target's left to the
    target, and the output layer that it lacks lent.

    What may cost acceptance is added to its warnings. Raises `TercelError` if it does not fit.
    """
    model, warnings = fitted(model, target)
    model = replace(model, warnings=(*model.warnings, *warnings))
    if model.head.config.own_embeddings:
        model = share_embeddings(model, target.embed(torch.arange(target.vocab_size, device=target.device)))
    return replace(model, head=model.head.beside(target, model.vocabulary.ids))


def fitted(model: DraftModel, target: KnownTarget) -> tuple[DraftModel, tuple[str, ...]]:
    """`model`, still as its files have it, with its feature layers settled as far as the target is known; and what may
    cost acceptance, in sentences.

    Raises `TercelError` if it does not fit.
    """
    warnings = check_fits(model, target)
    return model if target.num_layers is None else placed(model, target.num_layers), warnings


def placed(model: DraftModel, num_layers: int) -> DraftModel:
    """`model` with the feature layers that its files leave to the target's depth.

    Raises `TercelError` if a layer is out of range, or the head is for a target of another depth.
    """
    return replace(model, head=model.head.placed(num_layers))


@torch.no_grad()
def share_embeddings(model: DraftModel, of_target: Tensor) -> DraftModel:
    """`model` without embeddings of its own, if in bfloat16 they are those of its target, `[V, K]` as they enter its
    first layer; otherwise `model` as it is. Speculators saves them, other engines want them left out."""
    config = model.head.config
    if not config.own_embeddings:
        return model
    if not repeats(model.head.embed_tokens.weight, of_target):
        return model
    told = Convention("embeddings", "the target's", "embed_tokens.weight in the file repeats them")
    others = tuple(c for c in model.conventions if c.name != told.name)
    return replace(model, head=model.head.without_embeddings(), conventions=(*others, told))


def repeats(own: Tensor, of_target: Tensor) -> bool:
    """Whether a head's tensor is in bfloat16 that of its target."""
    return own.shape == of_target.shape and torch.equal(own.to(of_target.device, torch.bfloat16), of_target.bfloat16())
