"""Counters of drafts on the page that servers give to Prometheus."""

from __future__ import annotations

import io
import re

from tercel.measure.counts import MAX_DEPTH, Counts, number

_LINE = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*)(\{(?P<labels>.*)\})?\s+(?P<value>[-+.\w]+)")
_POSITION = re.compile(r'position="([0-9]{1,4})"')
_DRAFTS, _DRAFTED, _ACCEPTED = "num_drafts_total", "num_draft_tokens_total", "num_accepted_tokens_total"
_PER_POSITION = "num_accepted_tokens_per_pos_total"


def read_counters(text: str, prefix: str) -> Counts | None:
    """`{prefix}:spec_decode_*` of a Prometheus page, all engines of the server summed; None if it has none.

    Raises `TercelError` for a counter that cannot be true.
    """
    start = f"{prefix}:spec_decode_"
    sums: dict[str, int] = {}
    positions: dict[int, int] = {}
    for line in io.StringIO(text):
        match = _LINE.match(line) if line.startswith(start) else None
        name = match["name"].removeprefix(start) if match is not None else ""
        if match is None or name not in (_DRAFTS, _DRAFTED, _ACCEPTED, _PER_POSITION):
            continue
        value = number(_float(match["value"]), match["name"])
        if name != _PER_POSITION:
            sums[name] = number(sums.get(name, 0) + value, match["name"])
        elif place := _POSITION.search(match["labels"] or ""):
            at = int(place[1])
            positions[at] = number(positions.get(at, 0) + value, match["name"])
    if _DRAFTS not in sums:
        return None
    number(len(positions), "the number of positions in its counters", MAX_DEPTH)
    told = tuple(positions[i] for i in sorted(positions)) or None
    return Counts(sums[_DRAFTS], sums.get(_DRAFTED, 0), sums.get(_ACCEPTED, 0), told)


def _float(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text
