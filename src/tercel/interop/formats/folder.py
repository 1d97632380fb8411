"""A foreign folder opened: its config and its tensors side by side, and the plain questions one asks of a config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from tercel.errors import TercelError
from tercel.reading import short


@dataclass(frozen=True)
class ForeignFolder:
    """config: the whole config.json; body: the part with the layer's sizes, which is the config itself but for
    speculators' `transformer_layer_config`; tensors: by this package's names; maker: one of `makers`' names; file
    and where: weights and config, as sentences name them.
    """

    config: Mapping[str, Any]
    body: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    maker: str
    file: Path
    where: Path


def section(config: Mapping[str, Any], name: str, where: Path) -> Mapping[str, Any]:
    """An object within a config; empty if it is missing. Raises `TercelError` if it is no object."""
    value = config.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise TercelError(f"{name} in {where} must be an object, not {short(value)}; save or fetch the head again")
    return value


def size(values: Mapping[str, Any], key: str, where: Path, default: int | None = None) -> int:
    """A whole number of at least 1 in a config. Raises `TercelError` if it is none, or missing without a default."""
    value = values.get(key)
    if value is None and default is not None:
        return default
    if value is None:
        raise TercelError(f"{where} has no {key}; save or fetch the head again")
    if type(value) is not int or value < 1:  # bool is an int too
        raise TercelError(f"{key} in {where} must be a whole number of at least 1, not {short(value)}")
    return value
