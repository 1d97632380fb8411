"""The norms and biases that makers add to the paper's head: told by the config and by which tensors are there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tercel.errors import TercelError
from tercel.interop.formats.folder import ForeignFolder, section
from tercel.interop.formats.makers import SPECFORGE, SPECULATORS
from tercel.interop.formats.notes import Notes
from tercel.reading import short


@dataclass(frozen=True)
class Flags:
    """The flags of `HeadConfig` by the same names."""

    fc_norm: bool
    norm_output: bool
    norm_before_residual: bool
    norm_before_fc: bool
    attention_bias: bool


@dataclass(frozen=True)
class Said:
    """What a config says of a flag, None if nothing, and where."""

    value: bool | None
    place: str


def read_flags(s: ForeignFolder, notes: Notes) -> Flags:
    """Raises `TercelError` if a flag is no truth value, said twice differently, or denied by the tensors."""
    top = [("config.json", s.config)]
    nested = [*top, ("eagle_config", section(s.config, "eagle_config", s.where))]
    layer = [("config.json", s.body)]
    fc_norm = _said(top, ("fc_norm", "use_aux_norm"), s.where)
    before_fc = _said(nested, ("norm_before_fc",), s.where)
    bias = _said(layer, ("attention_bias",), s.where)
    return Flags(
        fc_norm=_seen("fc_norm", fc_norm, "fc_norm.0.weight", s, notes),
        norm_output=_norm_output(_said(top, ("norm_output",), s.where), s.maker, notes),
        norm_before_residual=_norm_before_residual(_said(nested, ("norm_before_residual",), s.where), s.maker, notes),
        norm_before_fc=_seen("norm_before_fc", before_fc, "input_norm.weight", s, notes),
        attention_bias=_seen("attention_bias", bias, "midlayer.self_attn.q_proj.bias", s, notes),
    )


def _said(places: list[tuple[str, Mapping[str, Any]]], names: tuple[str, ...], where: Path) -> Said:
    found = [(values[name], place, name) for place, values in places for name in names if values.get(name) is not None]
    for value, place, name in found:
        if not isinstance(value, bool):
            raise TercelError(f"{name} in {where} ({place}) must be true or false, not {short(value)}")
    if any(value != found[0][0] for value, _, _ in found):
        one, other = found[0], next(entry for entry in found if entry[0] != found[0][0])
        raise TercelError(
            f"{where} says {one[2]} {_word(one[0])} in {one[1]} but {other[2]} {_word(other[0])} in {other[1]}; "
            "remove the wrong one"
        )
    return Said(found[0][0], f"{found[0][2]} of {found[0][1]}") if found else Said(None, "")


def _seen(name: str, said: Said, tensor: str, s: ForeignFolder, notes: Notes) -> bool:
    """A flag that brings tensors: these decide where the config says nothing, and may not contradict it."""
    there = tensor in s.tensors
    if said.value is None and there:
        notes.doubt(
            f"{tensor} is there, but the config does not say {name}: taken as true; engines go by the config and "
            "would leave the tensor out"
        )
    if said.value is not None and said.value != there:
        raise TercelError(
            f"{s.where} says {name} {_word(said.value)}, but {tensor} is {'there' if there else 'missing'} in "
            f"{s.file.name}; config and weights are of different heads"
        )
    notes.holds(name, _word(there), said.place or f"{tensor} is {'there' if there else 'not there'}")
    return there


def _norm_before_residual(said: Said, maker: str, notes: Notes) -> bool:
    if said.value is not None:
        notes.holds("norm_before_residual", _word(said.value), said.place)
        if said.place.endswith("eagle_config"):
            notes.doubt("norm_before_residual is said in eagle_config only, where no engine reads it: move it out")
        return said.value
    if maker == SPECULATORS:
        notes.holds("norm_before_residual", "false", "not said, and speculators' default")
        notes.doubt(
            "the config does not say norm_before_residual: speculators means false, but vLLM takes true for such a "
            "folder; if acceptance is low, add it"
        )
        return False
    notes.holds("norm_before_residual", "false", "not said; the paper's head, and what engines take for this format")
    return False


def _norm_output(said: Said, maker: str, notes: Notes) -> bool:
    if said.value is None:
        notes.holds("norm_output", "false", "not said; the paper's head, and what engines take")
        return False
    notes.holds("norm_output", _word(said.value), said.place)
    if maker == SPECFORGE:
        notes.doubt(
            f"the config says norm_output {_word(said.value)}: for engines, whether the normed output is fed back; but "
            "SpecForge's trainer (0.2) means by it whether lm_head sees the normed output at all"
        )
    return said.value


def _word(value: bool) -> str:
    return "true" if value else "false"
