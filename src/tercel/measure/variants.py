"""Ways in which a head can be read wrong that change no shape, so that nothing fails but acceptance."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from tercel.draft import DraftModel, HeadConfig
from tercel.draft.binding import placed
from tercel.interop.formats.head_files import HeadFiles
from tercel.measure.chains import read_as, without_map
from tercel.target_model.protocol import TargetModel

AS_READ = "as read"
_ENGINE_THETA = 10_000.0  # what loaders take where a config names none


@dataclass(frozen=True)
class Variant:
    """setting: what is different, in words. model: the head read so. remedy: what to do if that turns out to be
    right: an option of `tercel inspect`, or a line in the head's files."""

    setting: str
    model: DraftModel
    remedy: str


def readings(model: DraftModel, target: TargetModel) -> Iterator[Variant]:
    """The head as it was read, and the other ways in which it may have been meant, one change at a time.

    Raises `TercelError` if the head cannot stand beside the target.
    """
    model = placed(model, target.num_layers)
    config, layers = model.head.config, model.head.config.feature_layers
    yield Variant(AS_READ, model, "")
    file = "tercel.json" if model.format == "tercel" else "config.json"
    for move in (1, -1):
        moved = tuple(layer + move for layer in layers)
        if min(moved) >= 0 and max(moved) < target.num_layers:
            ids = ", ".join(map(str, moved))
            moved_model = read_as(model, feature_layers=moved)
            yield Variant(f"layer ids {move:+d} ({ids})", moved_model, _layer_remedy(model, moved))
    flipped = not config.norm_before_residual
    word = str(flipped).lower()
    yield Variant(
        f"norm_before_residual {word}",
        read_as(model, norm_before_residual=flipped),
        f"norm_before_residual {word} in {file}",
    )
    theirs = rope_theta_of(target)
    if theirs != float(config.rope_parameters["rope_theta"]):
        remedy = f"rope_theta {theirs:g} in {file}"
        yield Variant(f"RoPE base {theirs:g}, the target's", _with_theta(model, theirs), remedy)


def faults(model: DraftModel, target: TargetModel) -> Iterator[Variant]:
    """The head as it was read, and what a server that loads it wrongly would make of it. `remedy`: what to do there.

    Raises `TercelError` as `readings`.
    """
    again = "export the head for this engine with `tercel export`, which writes it out, and serve that folder"
    for variant in readings(model, target):
        yield replace(variant, remedy=again)
        if variant.setting == AS_READ:
            model = variant.model
    config = model.head.config
    theta = float(config.rope_parameters["rope_theta"])
    if _ENGINE_THETA not in (theta, rope_theta_of(target)):
        yield Variant(f"RoPE base {_ENGINE_THETA:g}, the default", _with_theta(model, _ENGINE_THETA), again)
    if model.vocabulary.pruned:
        yield Variant("draft vocabulary without its map d2t", without_map(model), again)
    yield Variant(
        f"norm_output {str(not config.norm_output).lower()}", read_as(model, norm_output=not config.norm_output), again
    )
    if config.own_embeddings and config.hidden_size == target.hidden_size:
        yield Variant("the target's embeddings in place of the head's", _sharing(model, target), again)


def _layer_remedy(model: DraftModel, inputs: tuple[int, ...]) -> str:
    """How to have these layers captured: by an option, if the ids in the files can mean them."""
    if model.format == "tercel":
        return f"feature_layers {list(inputs)} in tercel.json"
    written = HeadFiles.read(model.path).layer_ids().values() if model.path is not None else ()
    if inputs in written:
        return "--layer-ids input"
    if tuple(i - 1 for i in inputs) in written:
        return "--layer-ids output"
    return f"eagle_aux_hidden_state_layer_ids {list(inputs)} in config.json, and --layer-ids input"


def _with_theta(model: DraftModel, theta: float) -> DraftModel:
    return read_as(model, rope_parameters={**model.head.config.rope_parameters, "rope_theta": theta})


@torch.no_grad()
def _sharing(model: DraftModel, target: TargetModel) -> DraftModel:
    shared = read_as(model)
    ids = torch.arange(shared.head.config.vocab_size, device=target.device)
    shared.eagle3.embed_tokens.weight.copy_(target.embed(ids))
    return shared


def rope_of(target: TargetModel) -> dict[str, Any]:
    """The RoPE settings that a head made for this target would have."""
    return HeadConfig.for_target(
        target.config,
        feature_layers=(0,),
        vocab_size=target.vocab_size,
        draft_vocab_size=1,
        max_position_embeddings=1,
    ).rope_parameters


def rope_theta_of(target: TargetModel) -> float:
    """The RoPE base that a head made for this target would have."""
    return float(rope_of(target)["rope_theta"])
