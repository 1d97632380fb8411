"""Whether a draft head belongs to a target: a head of another one drafts nonsense, or crashes late."""

from __future__ import annotations

import torch

from tercel.draft import DraftModel
from tercel.errors import TercelError
from tercel.heads import resolve_head
from tercel.interop.formats.embeddings import share_embeddings
from tercel.interop.formats.read import LayerIds, read_head
from tercel.interop.output_rows import lend_output_layer
from tercel.target_model.protocol import TargetModel


def load_draft(
    name: str | None, target: TargetModel, *, force: bool = False, layer_ids: LayerIds = "auto"
) -> DraftModel:
    """Load a head (a folder in any format, `owner/name` on the Hub, the name of a target with a shipped head, or None
    for this target's shipped one) in the target's precision, and check that it belongs to the target.

    layer_ids: what the ids in files of other makers mean, where that is doubted.
    Raises `TercelError` if there is no such head, it is damaged, or it is another target's.
    """
    path = resolve_head(name, target.source.name)
    model = read_head(
        path, dtype=target.dtype, device=str(target.device), num_layers=target.num_layers, layer_ids=layer_ids
    )
    check_fits(model, target, force=force)
    if model.head.config.own_embeddings:
        model = share_embeddings(model, target.embed(torch.arange(target.vocab_size, device=target.device)))
    return lend_output_layer(model, target)


def check_fits(model: DraftModel, target: TargetModel, *, force: bool = False) -> None:
    """Compare sizes, layers, tokenizer and weights of `target` with what the head was made for.

    force: take a head that was trained for other weights of the same shape (a fine-tuned target, say).
    Raises `TercelError` for the first difference.
    """
    head, name = model.head.config, target.source.name
    where = str(model.path) if model.path is not None else "the head"
    if head.target_hidden_size != target.hidden_size:
        raise TercelError(
            f"{where} takes features of width {head.target_hidden_size}, but {name} has hidden size "
            f"{target.hidden_size}; it is a head of another target"
        )
    if head.vocab_size != target.vocab_size:
        raise TercelError(
            f"{where} is for a vocabulary of {head.vocab_size} tokens, but {name} has {target.vocab_size}; "
            "it is a head of another target"
        )
    beyond = head.beyond(target.num_layers)
    if beyond:
        raise TercelError(
            f"{where} reads the input of layer {beyond[0]}, but {name} has layers 0..{target.num_layers - 1}"
            "; it is a head of another target"
        )
    if head.target_num_layers != target.num_layers:
        raise TercelError(
            f"{where} is for a target of {head.target_num_layers} layers, but {name} has {target.num_layers}"
            "; it is a head of another target"
        )
    identity = model.info.target
    if identity is None:
        return
    if identity.tokenizer != target.tokenizer_digest:
        raise TercelError(
            f"{where} was trained with the tokenizer of {identity.name}, but {name} has another one, so that "
            "its drafts would be other tokens; give the target it was trained for"
        )
    if not target.is_recorded_as(identity.weights) and not force:
        raise TercelError(
            f"{where} was trained for {identity.name}, whose weights or settings are not those of {name}; acceptance "
            "may be poor, so give the right target, or --force-head to use it anyway"
        )
