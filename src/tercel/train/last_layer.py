"""A head that begins as its target's last layer, in place of one that begins at random."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tercel.draft import Eagle3Head
from tercel.errors import TercelError
from tercel.target_model.model import Target
from tercel.target_model.output_layer import probe_tokens
from tercel.target_model.protocol import TargetModel

_MATRICES = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)
_NORMS = {"input_layernorm": "hidden_norm", "post_attention_layernorm": "post_attention_layernorm"}


@torch.no_grad()
def take_last_layer(head: Eagle3Head, target: TargetModel) -> float:
    """Give the head the matrices and norms of the target's last layer, for the half of its input that is the hidden
    state; what it reads of the embedding, which no layer of the target reads again, stays as it was drawn. Returns the
    size of what enters that layer, which the fused hidden should have.

    Raises `TercelError` for a target whose last layer has other parts than the head's, other sizes, or is not loaded.
    """
    if not isinstance(target, Target):
        raise TercelError(f"{target.source.name} has no layers of transformers to begin with; leave out layer_start")
    last, own = target.stock.layers[-1], head.midlayer
    modules, mine = dict(last.named_modules()), dict(own.named_modules())
    if any(parameter.numel() == 0 for parameter in last.parameters()):
        raise TercelError(
            "layer_start: target takes the target's last layer, which is not loaded where features come from files; "
            "leave --features out, or layer_start"
        )
    known = {f"{name}.weight" for name in (*_MATRICES, *_NORMS)}
    if known != {name for name, _ in last.named_parameters()}:
        raise TercelError(
            f"the last layer of {target.source.name} has other parts than a head's, which cannot start from it; leave "
            "out layer_start"
        )
    for name in _MATRICES:
        weight, place = modules[name].weight.float(), mine[name].weight
        if name.endswith(("q_proj", "k_proj", "v_proj")):
            place = place[:, head.config.hidden_size :]  # behind the embedding's half
        _copy(place, weight, name)
    for theirs, name in _NORMS.items():
        _copy(mine[name].weight, _effective(modules[theirs], head), name)
    number = len(target.stock.layers) - 1
    entering = target.encode(probe_tokens(target.stock.model), (number,)).layers[0].float()
    return float(entering.pow(2).mean(-1).sqrt().median())


def _effective(norm: nn.Module, head: Eagle3Head) -> Tensor:
    """`[H]`, what a norm multiplies with: of some the stored weights are one less."""
    width = next(norm.parameters()).shape[0]
    return norm(torch.ones(1, width, device=head.device, dtype=next(norm.parameters()).dtype))[0].float()


def _copy(place: Tensor, weight: Tensor, name: str) -> None:
    if place.shape != weight.shape:
        raise TercelError(
            f"{name} of the target's last layer is {list(weight.shape)}, that of the head {list(place.shape)}; leave "
            "out layer_start, or mlp_width"
        )
    place.copy_(weight)
