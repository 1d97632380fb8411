"""The tree of drafted tokens that one target forward verifies, and the choice of its nodes (spec section 8).

`N` nodes of a tree, root included; `M` nodes proposed, root excluded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from tercel.errors import TercelError


class DraftTree:
    """Drafted tokens hanging from the last committed token.

    tokens: [N]; entry 0 is the last committed token.
    parents: [N]; -1 for the root, else an index smaller than the node's own.

    Siblings are ordered by index. Raises `TercelError` if the parents are no such tree.
    """

    def __init__(self, tokens: Tensor | Sequence[int], parents: Tensor | Sequence[int]) -> None:
        shapes = tuple(tuple(part.shape) if isinstance(part, Tensor) else (len(part),) for part in (tokens, parents))
        if shapes[0] != shapes[1] or len(shapes[0]) != 1 or not shapes[0][0]:
            raise TercelError(
                f"a draft tree needs one parent per token, but tokens have shape {shapes[0]} and parents {shapes[1]}"
            )
        self.token_list: list[int] = _numbers(tokens)
        self.parent_list: list[int] = _numbers(parents)
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
        return cls([root, *tokens], range(-1, len(tokens)))

    @classmethod
    def root_only(cls, root: int) -> DraftTree:
        """No draft: verification then is token-by-token decoding."""
        return cls.chain(root, ())

    @classmethod
    def merged(cls, root: int, paths: Iterable[Sequence[int]], nodes: int) -> DraftTree:
        """All these paths from `root`, each beginning that they share only once: the first of them, up to `nodes`
        nodes, root included."""
        tokens, parents, known = [root], [-1], dict[tuple[int, int], int]()
        for path in paths:
            node = 0
            for token in path:
                child = known.get((node, token))
                if child is None:
                    if len(tokens) == nodes:
                        break
                    child = known[node, token] = len(tokens)
                    tokens.append(token)
                    parents.append(node)
                node = child
        return cls(tokens, parents)

    @cached_property
    def tokens(self) -> Tensor:
        """Long [N]."""
        return torch.tensor(self.token_list)

    @cached_property
    def parents(self) -> Tensor:
        """Long [N]."""
        return torch.tensor(self.parent_list)

    @cached_property
    def _children(self) -> list[list[int]]:
        children: list[list[int]] = [[] for _ in self.parent_list]
        for node, parent in enumerate(self.parent_list[1:], start=1):
            children[parent].append(node)
        return children

    def children(self, node: int) -> Sequence[int]:
        """The node's children, ascending; not to be changed."""
        return self._children[node]

    def child(self, node: int, token: int) -> int | None:
        """The first child of the node that holds the token; None if there is none."""
        return next((child for child in self._children[node] if self.token_list[child] == token), None)

    @cached_property
    def depth_list(self) -> list[int]:
        """Distance of every node from the root: the target position is the root's plus this."""
        depths = [0] * len(self)
        for node, parent in enumerate(self.parent_list[1:], start=1):
            depths[node] = depths[parent] + 1
        return depths

    def only(self, nodes: Sequence[int]) -> DraftTree:
        """The tree of these nodes, ascending: the root, and none without its parent."""
        numbers = {node: number for number, node in enumerate(nodes)} | {-1: -1}
        parents = [numbers[self.parent_list[node]] for node in nodes]
        return DraftTree([self.token_list[node] for node in nodes], parents)

    def ancestor_mask(self) -> Tensor:
        """Who sees whom, bool [N, N]: row `i` is true at `i` and at its ancestors."""
        seen, width = [0] * (len(self) + 1), -(-len(self) // 8)  # a row is a number, its bits the nodes; [-1]: no one's
        for node, parent in enumerate(self.parent_list):
            seen[node] = seen[parent] | 1 << node
        rows = b"".join(row.to_bytes(width, "little") for row in seen[:-1])
        bits = np.unpackbits(np.frombuffer(rows, np.uint8).reshape(-1, width), axis=1, bitorder="little")
        return torch.from_numpy(bits[:, : len(self)].view(bool))


def _numbers(values: Tensor | Sequence[int]) -> list[int]:
    return values.tolist() if isinstance(values, Tensor) else list(values)


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
