"""Where the parts of a stock model are, and what its configuration says of its attention and its length."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from tercel.errors import TercelError

NO_LIMIT = 1 << 30
_LIMITS = ("max_position_embeddings", "max_seq_len")


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """The stack of layers after which the output layer comes.

    Raises `TercelError` if the model's parts are not where those of a causal language model are.
    """
    decoder = model.get_decoder()
    if decoder is model:  # Llama 4 gives itself
        inner = [child for child in model.children() if isinstance(child, PreTrainedModel)]
        if len(inner) != 1:
            raise TercelError(f"found no decoder in {type(model).__name__}; this architecture is not supported yet")
        decoder = inner[0]
    return decoder


def check_widths(model: PreTrainedModel, hidden: int) -> None:
    """Refuse models that project between embeddings and layers: a head has no such layers (OPT-350m)."""
    embeddings: Any = model.get_input_embeddings()
    width = embeddings.weight.shape[1]
    if width != hidden:
        raise TercelError(
            f"{type(model).__name__} has embeddings of width {width} but layers of width {hidden}; "
            "targets that project in between are not supported"
        )


def default_feature_layers(num_layers: int) -> tuple[int, ...]:
    """Low, middle and high: the inputs of layers `2`, `L//2`, `L-3` (spec section 1); of the first, a middle
    and the last layer where the model has fewer than seven.

    Raises `TercelError` for a model of fewer than three layers, for which layers have to be chosen by hand.
    """
    if num_layers < 3:
        raise TercelError(
            f"a model of {num_layers} layers has no low, middle and high layer; name the feature layers yourself"
        )
    return (2, num_layers // 2, num_layers - 3) if num_layers >= 7 else (0, num_layers // 2, num_layers - 1)


def context_length(config: PretrainedConfig) -> int:
    """The longest sequence the model's positions allow."""
    known = (getattr(config, name, None) for name in _LIMITS)
    return next((int(value) for value in known if value), NO_LIMIT)


def rope_kinds(config: PretrainedConfig) -> list[dict[str, Any]]:
    """The RoPE parameters: one set, or one for each kind of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return [value for value in parameters.values() if isinstance(value, dict)] or [parameters]


def decoder_layers(decoder: nn.Module, count: int) -> nn.ModuleList:
    for module in decoder.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise TercelError(
        f"found no list of {count} decoder layers in {type(decoder).__name__}; its features cannot be captured"
    )


def attention_windows(config: Any) -> dict[str, int | None]:
    """Kinds of attention layers and their windows (None: unlimited), as the model's masks are keyed."""
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ())
    if not kinds:  # older configurations: one window for all layers
        return {"full_attention": window}
    return {kind: window if kind == "sliding_attention" else None for kind in sorted(kinds)}
