"""How large a draft is: here, in the launch lines of engines, and as a server tells it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tercel import limits
from tercel.errors import TercelError
from tercel.reading import short

CHAIN_DEPTH = 4  # drafted tokens of a chain, where nothing else is said


@dataclass(frozen=True)
class TreeShape:
    """top_k children a node and frontier width `K`; depth: deepest level; nodes: tree size `N`, root included, which is
    what is verified at once. With top_k 1 it is a chain.

    Raises `TercelError` for a shape without a draft.
    """

    top_k: int
    depth: int
    nodes: int

    def __post_init__(self) -> None:
        fine = 1 <= self.top_k <= limits.DRAFT_TOP_K and 1 <= self.depth <= limits.DRAFT_DEPTH
        if not fine or not 2 <= self.nodes <= limits.DRAFT_NODES:
            raise TercelError(
                f"a draft tree has top-k 1 to {limits.DRAFT_TOP_K}, depth 1 to {limits.DRAFT_DEPTH} and 2 to "
                f"{limits.DRAFT_NODES} nodes, not {short(self.top_k)}, {short(self.depth)} and {short(self.nodes)}"
            )

    @classmethod
    def for_device(cls, device: torch.device) -> TreeShape:
        """The paper's tree (for an 8 B model) where 60 nodes cost about what one does; on a CPU every node costs,
        and there a small one was the fastest of those tried (docs/log.md)."""
        return cls(6, 3, 10) if device.type == "cpu" else cls(10, 8, 60)

    @classmethod
    def chain(cls, depth: int = CHAIN_DEPTH) -> TreeShape:
        return cls(top_k=1, depth=depth, nodes=depth + 1)

    def __str__(self) -> str:
        if self.top_k == 1:
            return f"a chain of {self.depth}"
        return f"a tree of {self.nodes} nodes, top-k {self.top_k}, depth {self.depth}"
