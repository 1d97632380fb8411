"""The tree of drafted tokens that one target forward verifies, and the choice of its nodes (spec section 8).

`N` nodes of a tree, root included; `M` nodes proposed, root excluded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from tercel.errors import TercelError


@dataclass(frozen=True, eq=False)
class DraftTree:
    """Drafted tokens hanging from the last committed token.

    tokens: long [N]; entry 0 is the last committed token.
    parents: long [N]; -1 for the root, else an index smaller than the node's own.

    Siblings are ordered by index. Raises `TercelError` if the parents are no such tree.
    """

    tokens: Tensor
    parents: Tensor

    def __post_init__(self) -> None:
        if self.tokens.ndim != 1 or self.tokens.shape != self.parents.shape or not len(self.tokens):
            raise TercelError(
                f"a draft tree needs one parent per token, but tokens have shape {tuple(self.tokens.shape)} "
                f"and parents {tuple(self.parents.shape)}"
            )
        for node, parent in enumerate(self.parent_list):
            if parent >= node or parent < min(node - 1, 0):
                raise TercelError(
                    f"node {node} of the draft tree has parent {parent}; the root (node 0) has -1, "
                    "every other node one that comes before it"
                )

    def __len__(self) -> int:
        return len(self.parent_list)

    @classmethod
    def chain(cls, root: int, tokens: Sequence[int]) -> DraftTree:
        """One path from `root` through `tokens`."""
        return cls(torch.tensor([root, *tokens]), torch.arange(-1, len(tokens)))

    @classmethod
    def root_only(cls, root: int) -> DraftTree:
        """No draft: verification then is token-by-token decoding."""
        return cls.chain(root, ())

    @cached_property
    def token_list(self) -> list[int]:
        return self.tokens.tolist()

    @cached_property
    def parent_list(self) -> list[int]:
        return self.parents.tolist()

    @cached_property
    def _children(self) -> list[list[int]]:
        children: list[list[int]] = [[] for _ in self.parent_list]
        for node, parent in enumerate(self.parent_list[1:], start=1):
            children[parent].append(node)
        return children

    def children(self, node: int) -> tuple[int, ...]:
        """The node's children, ascending."""
        return tuple(self._children[node])

    def child(self, node: int, token: int) -> int | None:
        """The first child of the node that holds the token; None if there is none."""
        return next((child for child in self._children[node] if self.token_list[child] == token), None)

    @cached_property
    def depth_list(self) -> list[int]:
        """Distance of every node from the root."""
        depths = [0] * len(self)
        for node, parent in enumerate(self.parent_list[1:], start=1):
            depths[node] = depths[parent] + 1
        return depths

    @property
    def depths(self) -> Tensor:
        """The same, long [N]: the target position is the root's plus this."""
        return torch.tensor(self.depth_list, device=self.tokens.device)

    def only(self, nodes: Sequence[int]) -> DraftTree:
        """The tree of these nodes, ascending: the root, and none without its parent."""
        numbers = {node: number for number, node in enumerate(nodes)} | {-1: -1}
        parents = [numbers[self.parent_list[node]] for node in nodes]
        return DraftTree(torch.tensor([self.token_list[node] for node in nodes]), torch.tensor(parents))

    def ancestor_mask(self) -> Tensor:
        """Who sees whom, bool [N, N]: row `i` is true at `i` and at its ancestors."""
        mask = np.eye(len(self), dtype=bool)
        for node, parent in enumerate(self.parent_list[1:], start=1):
            mask[node] |= mask[parent]
        return torch.from_numpy(mask).to(self.tokens.device)


@dataclass(frozen=True, eq=False)
class Selection:
    """The chosen ones of M proposed nodes, ready to stand after a root.

    indices: long [m]; into the proposed nodes, ascending, so parents precede children and siblings keep their
    order.
    parents: long [m]; in the numbers of the tree made of them: 0 is the root, `j + 1` the node `indices[j]`.
    """

    indices: Tensor
    parents: Tensor


def select_best(scores: Tensor, depths: Tensor, parents: Tensor, n: int) -> Selection:
    """The best `n` proposed nodes that form a tree: EAGLE-2's reranking, ordered by (score, depth, index).

    scores: float [M], cumulative log-probabilities. depths: long [M], 1 for the root's children. parents:
    long [M], -1 for the root, else an index into the proposed nodes smaller than the node's own. All of them
    are taken if there are fewer than `n`.

    A parent always comes before its child: at equal scores by depth, and a score that rounding lifted above
    its parent's counts as the parent's.
    Raises `TercelError` for a parent that does not precede its child.
    """
    count = len(scores)
    own = torch.arange(count, device=scores.device)
    if not bool(((parents < own) & (parents >= -1)).all()):
        raise TercelError("a proposed node does not come after its parent; propose the tree level by level")
    # Slot 0 is the root: its score bounds nothing and it is its own ancestor.
    bounded = torch.cat([scores.new_full((1,), torch.inf), scores])
    ancestor = torch.cat([parents.new_zeros(1), parents + 1])
    deepest = int(depths.max()) if count else 0
    for _ in range(deepest.bit_length()):  # reach 1, 2, 4, … ancestors up
        bounded = torch.minimum(bounded, bounded[ancestor])
        ancestor = ancestor[ancestor]
    by_depth = torch.argsort(depths, stable=True)
    by_score = torch.argsort(bounded[1:][by_depth], descending=True, stable=True)
    indices = by_depth[by_score][: max(n, 0)].sort().values

    slots = parents.new_zeros(count + 1)
    slots[indices + 1] = torch.arange(1, len(indices) + 1, device=scores.device)
    return Selection(indices, slots[parents[indices] + 1])
