"""Embeddings that a head repeats from its target: speculators saves them, other engines want them left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tercel.draft import Convention, DraftModel

_NAMES = ("model.embed_tokens.weight", "model.language_model.embed_tokens.weight", "gpt_neox.embed_in.weight")
_SCALED = ("embedding_multiplier", "scale_embedding", "hidden_size_per_layer_input")  # settings of models that scale


@torch.no_grad()
def share_embeddings(model: DraftModel, of_target: Tensor) -> DraftModel:
    """`model` without embeddings of its own, if in bfloat16 they are those of its target, `[V, K]` as they enter its
    first layer; otherwise `model` as it is."""
    config = model.head.config
    if not config.own_embeddings:
        return model
    own = model.head.embed_tokens.weight
    if own.shape != of_target.shape or not torch.equal(own.to(of_target.device, torch.bfloat16), of_target.bfloat16()):
        return model
    told = Convention("embeddings", "the target's", "embed_tokens.weight in the file repeats them")
    others = tuple(c for c in model.conventions if c.name != told.name)
    return replace(model, head=model.head.without_embeddings(), conventions=(*others, told))


def stored_embeddings(folder: Path, config: Mapping[str, Any]) -> Tensor | None:
    """The embeddings `[V, K]` in a target's folder; None if it has none to be found, or its model scales them."""
    text = config.get("text_config") or config
    if str(text.get("model_type", "")).startswith("gemma") or any(text.get(name) for name in _SCALED):
        return None
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as stored:
                found = next((name for name in stored.keys() if name in _NAMES), None)  # noqa: SIM118 (not a dict)
                if found is not None:
                    return stored.get_tensor(found)
        except (SafetensorError, OSError):
            return None
    return None
