"""A head's folder as engines see it: the settings in its config.json and the precision of its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from tercel.errors import TercelError
from tercel.reading import read_json

_NESTED = ("eagle_config", "transformer_layer_config")  # where other formats keep settings


@dataclass(frozen=True)
class HeadFiles:
    """config: all of config.json. dtypes: safetensors' name of each tensor's type (empty for pickles)."""

    config: Mapping[str, Any] = field(default_factory=dict)
    dtypes: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> HeadFiles:
        """Raises `TercelError` for a config.json or tensors that cannot be read; either may be absent."""
        path = folder / "config.json"
        config = read_json(path) if path.is_file() else {}
        dtypes: dict[str, str] = {}
        for file in sorted(folder.glob("*.safetensors")):
            try:
                with safe_open(file, framework="pt") as stored:
                    dtypes |= {name: stored.get_slice(name).get_dtype() for name in stored.keys()}  # noqa: SIM118
            except (SafetensorError, OSError) as error:
                raise TercelError(f"{file} is truncated or damaged ({error}); save or fetch it again") from error
        return cls(config, dtypes)

    def settings(self, name: str) -> dict[str, Any]:
        """By place in config.json ("" is the top), every value given for `name`."""
        places: dict[str, Any] = {"": self.config, **{n: self.config.get(n) for n in _NESTED}}
        return {place: values[name] for place, values in places.items() if isinstance(values, dict) and name in values}

    def layer_ids(self) -> dict[str, tuple[int, ...]]:
        """By place, as of `settings`, every list of feature layers as written: what the ids mean depends on who wrote
        them."""
        lists = self.settings("eagle_aux_hidden_state_layer_ids").items()
        return {
            place: tuple(ids)
            for place, ids in lists
            if isinstance(ids, list) and ids and all(isinstance(i, int) for i in ids)
        }

    def rope_thetas(self) -> dict[str, float]:
        """Every RoPE base that config.json names, by where it stands."""
        found: dict[str, Any] = {f"{place}.rope_theta": v for place, v in self.settings("rope_theta").items()}
        for name in ("rope_parameters", "rope_scaling"):
            for place, value in self.settings(name).items():
                if isinstance(value, dict) and "rope_theta" in value:
                    found[f"{place}.{name}.rope_theta"] = value["rope_theta"]
        return {k.lstrip("."): float(v) for k, v in found.items() if isinstance(v, int | float)}
