"""Numbers that a server tells of its drafts, believed only as far as they can be true."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tercel.draft.shape import TreeShape
from tercel.errors import TercelError

MAX_DEPTH = 64  # levels of a chain or tree; no engine has drafted nearly as deep
MAX_TOP_K = 64
MAX_NODES = 1024
_TOTAL = 1 << 53  # of a server since its start; beyond, a float no longer counts by ones


@dataclass(frozen=True)
class Counts:
    """drafts: steps that verified a draft; drafted, accepted: tokens; per_position: accepted ones by place in the
    chain, None where the engine does not tell."""

    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    per_position: tuple[int, ...] | None = None

    def since(self, before: Counts) -> Counts:
        """What was counted after `before`. Raises `TercelError` if anything became less."""
        positions = self.per_position
        if positions is not None and before.per_position is not None:
            padded = (*before.per_position, *(0,) * len(positions))  # a position may appear with its first draft
            positions = tuple(now - old for now, old in zip(positions, padded, strict=False))
        grown = Counts(
            self.drafts - before.drafts, self.drafted - before.drafted, self.accepted - before.accepted, positions
        )
        if min(grown.drafts, grown.drafted, grown.accepted, *(positions or ())) < 0:
            raise TercelError("the server's counters went backwards during an answer; was it restarted? ask again")
        return grown


def told_shape(depth: Any, top_k: Any = 1, nodes: Any = None) -> TreeShape:
    """The shape of a server's drafts, as far as it tells: depth of the chain; for a tree also top_k and nodes, root
    included. Raises `TercelError` for one that no engine has: what is simulated here has its size."""
    depth = number(depth, "the depth of its drafts", MAX_DEPTH, least=1)
    top_k = number(top_k, "top-k of its drafts", MAX_TOP_K, least=1)
    nodes = number(depth + 1 if nodes is None else nodes, "the number of nodes of its drafts", MAX_NODES, least=2)
    return TreeShape.chain(depth) if top_k == 1 else TreeShape(top_k, depth, nodes)


def number(value: Any, what: str, most: int = _TOTAL, *, least: int = 0) -> int:
    """`value` if it is a whole number from `least` to `most`; raises `TercelError` for anything else."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if type(value) is not int or not least <= value <= most:
        raise TercelError(
            f"the server reports {value!r:.40} as {what}, which is impossible; is it the engine you think it is?"
        )
    return value
