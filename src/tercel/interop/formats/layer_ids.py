"""Which layers a head reads: makers list ids of layer *outputs* or of layer *inputs*, and seldom say which.

The output of layer `i` is the input of layer `i + 1`. Within this package ids are always inputs. Left unsaid, all
makers and engines mean the same three layers of a target with `L`: inputs `2, L//2, L-3`, outputs `1, L//2-1, L-4`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tercel.errors import TercelError
from tercel.interop.formats.folder import ForeignFolder, section
from tercel.interop.formats.makers import ANGELSLIM_LIST, LIST, MODELOPT, SPECULATORS
from tercel.interop.formats.notes import Notes
from tercel.reading import short

Meaning = Literal["input", "output"]

SETTLE = "settle it with `tercel inspect HEAD --target TARGET --probe`, or say it with layer-ids"


@dataclass(frozen=True)
class Listed:
    """A list of ids as it stands in a config.

    habit: what is meant by lists of that maker in that place, and `why`; sure: whether all who write or read them
    there agree.
    """

    ids: tuple[int, ...]
    place: str
    habit: Meaning
    why: str
    sure: bool


def listed_layers(s: ForeignFolder, notes: Notes) -> Listed | None:
    """The list of layer ids with its maker's habit; None if there is none.

    Raises `TercelError` if it is no list of layers, or two lists contradict each other.
    """
    nested_place, top_place = f"eagle_config.{LIST}", f"the top-level {LIST}"
    nested = _ids(section(s.config, "eagle_config", s.where).get(LIST), f"{nested_place} in {s.where}")
    top = _ids(s.config.get(LIST), f"{LIST} in {s.where}")
    own = _ids(s.config.get(ANGELSLIM_LIST), f"{ANGELSLIM_LIST} in {s.where}")
    if nested and top and top not in (nested, as_inputs(nested, "output")):
        raise TercelError(
            f"{s.where} lists layers {_names(top)} at the top level but {_names(nested)} in eagle_config; "
            "remove the list that is wrong"
        )
    if s.maker == SPECULATORS and (top or nested):
        return Listed(top or nested, top_place if top else nested_place, "input", "as speculators means them", True)
    if nested and top and nested != top:
        return Listed(top, top_place, "input", "one more than the outputs in eagle_config", True)
    if top:
        return Listed(top, top_place, "input", "as vLLM and llama.cpp read them there, the only ones who do", False)
    if nested:
        why = "as ModelOpt means them" if s.maker == MODELOPT else "as SpecForge writes and SGLang reads them"
        return Listed(nested, nested_place, "output", why, False)
    if own:
        pattern = default_pattern(own)
        if pattern is None or pattern[0] != "output":
            notes.doubt(
                f"layers are listed as {ANGELSLIM_LIST}, which vLLM and SGLang do not read: they would capture their "
                "default layers; export the head for them"
            )
        return Listed(own, ANGELSLIM_LIST, "output", "as AngelSlim means them", True)
    return None


def as_inputs(ids: Sequence[int], meaning: Meaning) -> tuple[int, ...]:
    return tuple(i + 1 for i in ids) if meaning == "output" else tuple(ids)


def default_pattern(ids: Sequence[int]) -> tuple[Meaning, int] | None:
    """Whether the ids are the default layers of some target: as outputs or inputs, and of how many layers."""
    if len(ids) != 3 or not ids[0] < ids[1] < ids[2]:
        return None
    for meaning, first, last in (("input", 2, 3), ("output", 1, 4)):
        depth = ids[2] + last
        middle = depth // 2 if meaning == "input" else depth // 2 - 1
        if tuple(ids[:2]) == (first, middle):
            return ("input", depth) if meaning == "input" else ("output", depth)
    return None


def settle(listed: Listed, num_layers: int | None, override: Meaning | None, notes: Notes) -> tuple[int, ...]:
    """The ids as inputs, in the list's order; how they were taken goes to `notes`, with a doubt where it may be wrong.

    num_layers: the target's depth, if known. override: what the user says they mean.
    """
    meaning, source = (override, "as asked for") if override else _meaning(listed, num_layers, notes)
    layers = as_inputs(listed.ids, meaning)
    value = f"inputs {_names(layers)}" if meaning == "input" else f"outputs, so inputs {_names(layers)}"
    notes.holds("layer ids", value, f"{listed.place}, {source}")
    return layers


def _meaning(listed: Listed, num_layers: int | None, notes: Notes) -> tuple[Meaning, str]:
    """What the ids mean and why, from the pattern of the list, its first id, and its maker's habit."""
    pattern = default_pattern(listed.ids)
    if pattern is not None and num_layers is not None and pattern[1] != num_layers:
        notes.doubt(
            f"{listed.place} lists {_names(listed.ids)}, the default of a target of {pattern[1]} layers, but this one "
            f"has {num_layers}: is it the head of another target?"
        )
        pattern = None
    if listed.sure:
        if pattern is not None and pattern[0] != listed.habit:
            notes.doubt(
                f"{listed.place} lists {_names(listed.ids)}, taken as {listed.habit}s ({listed.why}), but as "
                f"{pattern[0]}s they would be the usual layers of a target of {pattern[1]}: was the list carried over "
                f"unchanged from another format? {SETTLE}"
            )
        return listed.habit, listed.why
    if pattern is not None:
        return pattern[0], f"the default {pattern[0]}s of a target of {pattern[1]} layers"
    if listed.habit == "output" and listed.ids[0] == 1:
        # SGLang's own rule (deepseek_v2.py, glm4_moe_lite.py): the input of layer 1 is hardly ever chosen
        return "output", "outputs because the first id is 1"
    other = "input" if listed.habit == "output" else "output"
    notes.doubt(
        f"{listed.place} lists {_names(listed.ids)}, taken as {listed.habit}s ({listed.why}), but others mean {other}s "
        f"by the same list; {SETTLE}"
    )
    return listed.habit, listed.why


def _ids(value: Any, place: str) -> tuple[int, ...]:
    """The list at `place` of a config; empty if it is missing or empty, as engines take it.

    Raises `TercelError` for anything but different whole numbers of at least 0.
    """
    if value is None or value == []:
        return ()
    if not isinstance(value, list) or not all(type(i) is int and i >= 0 for i in value):
        raise TercelError(f"{place} must be a list of layer numbers, not {short(value)}")
    if len(set(value)) != len(value):
        raise TercelError(f"{place} lists a layer twice ({_names(value)}), which engines capture once only")
    return tuple(value)


def _names(ids: Sequence[int]) -> str:
    return ", ".join(map(str, ids))
