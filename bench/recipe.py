"""Recipes of training for scripts: settings as a file has them, and budgets in optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args, get_type_hints

import yaml

from tercel.chat import TokenizedChat
from tercel.errors import TercelError
from tercel.train.config import TrainConfig


def settings_of(text: str, where: str) -> dict[str, Any]:
    """A YAML map of settings, by the names of `TrainConfig`. Raises `TercelError` for anything else."""
    try:
        told = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise TercelError(f"{where} is not YAML ({' '.join(str(error).split())})") from error
    hints, found = get_type_hints(TrainConfig, include_extras=True), {}
    if not isinstance(told, dict):
        raise TercelError(f"{where} is no map of settings")
    for key, value in told.items():
        name = str(key).replace("-", "_")
        if name not in hints:
            raise TercelError(f"{where}: there is no setting {key!r} of training")
        kind = get_args(hints[name])[0]
        if float in (kind, *get_args(kind)) and isinstance(value, str):
            try:
                value = float(value)  # YAML takes 5e-4 for a text
            except ValueError as error:
                raise TercelError(f"{where}: {key} must be a number, not {value!r}") from error
        found[name] = tuple(value) if isinstance(value, list) else value
    return found


def of_steps(config: TrainConfig, chats: Sequence[TokenizedChat], steps: int) -> TrainConfig:
    """With passes enough for the steps: packed batches are not quite full, and some chats are held out."""
    tokens = steps * config.batch_tokens * config.accumulate
    return replace(config, max_steps=steps, epochs=2 * math.ceil(tokens / max(1, sum(map(len, chats)))) + 1)
