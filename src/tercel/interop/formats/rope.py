"""The RoPE parameters of a head's config, which older and newer files keep in different places."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tercel.errors import TercelError
from tercel.interop.formats.folder import ForeignFolder, section
from tercel.interop.formats.notes import Notes
from tercel.reading import short

DEFAULT_THETA = 10000.0
_NOT_PARAMETERS = ("type", "mrope_section", "mrope_interleaved", "partial_rotary_factor")


def read_rope(s: ForeignFolder, notes: Notes) -> dict[str, Any]:
    """`rope_type`, `rope_theta` and what the type needs, from `rope_parameters`, `rope_scaling` and `rope_theta`.

    Raises `TercelError` if they contradict each other, or only a part of each head is rotated.
    """
    body, where = s.body, s.where
    parameters = section(body, "rope_parameters", where)
    if "full_attention" in parameters:  # one entry for each kind of layer; the head's is a full one
        parameters = section(parameters, "full_attention", where)
    scaling = section(body, "rope_scaling", where)
    kind = _agreed("RoPE type", [_kind(scaling), _kind(parameters)], where)
    theta = _agreed(
        "rope_theta", [body.get("rope_theta"), parameters.get("rope_theta"), scaling.get("rope_theta")], where
    )
    part = _agreed("partial_rotary_factor", [body.get("partial_rotary_factor"), *_parts(parameters, scaling)], where)
    if part not in (None, 1, 1.0):
        raise TercelError(
            f"{where} says partial_rotary_factor {part}, but an EAGLE-3 head here rotates whole heads; "
            "such a head cannot be run"
        )
    merged = {**scaling, **parameters}
    if kind == "mrope" or "mrope_section" in merged:
        kind = "default"
        notes.doubt("positions are multimodal (mrope): the head is read for text, where all three parts are equal")
    if theta is None:
        theta = DEFAULT_THETA
        notes.doubt(
            f"the config names no rope_theta, so {DEFAULT_THETA:.0f} is taken, as engines do; if the head was trained "
            "with the target's, acceptance suffers"
        )
    if isinstance(theta, bool) or not isinstance(theta, int | float) or not 0 < theta < math.inf:
        raise TercelError(f"rope_theta in {where} must be a number above 0, not {short(theta)}; fetch the head again")
    plain = kind in (None, "default")  # takes no parameters but the base
    kept = {k: v for k, v in merged.items() if not plain and k not in _NOT_PARAMETERS and v is not None}
    result = {**kept, "rope_type": "default" if plain else kind, "rope_theta": theta}
    notes.holds("RoPE", f"base {theta:g}, type {result['rope_type']}", "config.json")
    return result


def _kind(values: Mapping[str, Any]) -> Any:
    return values.get("rope_type", values.get("type"))


def _parts(*sections: Mapping[str, Any]) -> list[Any]:
    return [values.get("partial_rotary_factor") for values in sections]


def _agreed(name: str, values: list[Any], where: Path) -> Any:
    said = [value for value in values if value is not None]
    if any(value != said[0] for value in said):
        raise TercelError(
            f"{where} names two values of {name}, {' and '.join(map(str, dict.fromkeys(map(str, said))))}; "
            "remove the wrong one"
        )
    return said[0] if said else None
