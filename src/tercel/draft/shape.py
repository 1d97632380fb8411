"""How large a draft is."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tercel.errors import TercelError


@dataclass(frozen=True)
class TreeShape:
    """top_k children a node and frontier width `K`; depth: deepest level; nodes: tree size `N`, root included."""

    top_k: int
    depth: int
    nodes: int

    def __post_init__(self) -> None:
        if self.top_k < 1 or self.depth < 1 or self.nodes < 2:
            raise TercelError(
                f"a draft tree needs top-k and depth of at least 1 and 2 nodes, not {self.top_k}, {self.depth} "
                f"and {self.nodes}"
            )

    @classmethod
    def for_device(cls, device: torch.device) -> TreeShape:
        """The paper's tree (for an 8 B model) where 60 nodes cost about what one does; on a CPU every node costs,
        and there a small one was the fastest of those tried (`bench/step_cost.py`, docs/log.md)."""
        return cls(6, 3, 10) if device.type == "cpu" else cls(10, 8, 60)

    @classmethod
    def chain(cls, depth: int) -> TreeShape:
        return cls(top_k=1, depth=depth, nodes=depth + 1)
