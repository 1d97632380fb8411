"""Trees of one form, whatever is drafted: who is a node is settled by ranks before anything is known of the tokens.

Shapes, as suffixes of names: B rows, P nodes of a frontier and K of the next, C children of each.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from tercel.decode.draft_tree import DraftTree
from tercel.decode.growth import Frontier
from tercel.decode.types import Proposal
from tercel.draft.shape import TreeShape

# How likely a draft is taken to be right, by its rank among its siblings and by its depth: guessed once for all heads,
# fitted to none. Only the order of the products counts.
RANK_POWER, BY_DEPTH = 1.5, 0.6
Ranks = tuple[int, ...]


@dataclass(frozen=True)
class Level:
    """Nodes of one depth. parents: places in the frontier before; ranks: which child of it each is; frontier: which of
    the nodes have children; numbers: the parents' in the tree (0: the root)."""

    parents: tuple[int, ...]
    ranks: tuple[int, ...]
    frontier: tuple[int, ...]
    numbers: tuple[int, ...]


def likeliest_paths(shape: TreeShape) -> list[Ranks]:
    """Of the Cartesian product of `top_k` ranks over `depth` levels, with all its beginnings, the `nodes - 1` likeliest
    paths from the root, each after the paths it begins with: a node as a path of ranks (0: the likeliest).

    Every step adds the likeliest node that hangs on one taken before (arXiv 2401.10774, section 2.3.3). All of them are
    taken if there are fewer.
    """

    def chance(path: Ranks) -> float:
        product = 1.0
        for rank in path:
            product *= BY_DEPTH * (rank + 1) ** -RANK_POWER
        return product

    # next: the sibling of the next rank, and the first child
    first: Ranks = (0,)
    waiting, taken = [(-chance(first), first)], list[Ranks]()
    while waiting and len(taken) < shape.nodes - 1:
        _, path = heapq.heappop(waiting)
        taken.append(path)
        following: list[Ranks] = [(*path[:-1], path[-1] + 1)] if path[-1] + 1 < shape.top_k else []
        if len(path) < shape.depth:
            following.append((*path, 0))
        for other in following:
            heapq.heappush(waiting, (-chance(other), other))
    return taken


@cache
def levels_of(shape: TreeShape) -> tuple[Level, ...]:
    """The tree of that shape, level by level; siblings stand in the order of their ranks."""
    ordered = sorted(likeliest_paths(shape), key=lambda path: (len(path), path))
    number = {path: place for place, path in enumerate([(), *ordered])}
    inner = {path[:-1] for path in ordered}
    levels, frontier = list[Level](), dict[Ranks, int]({(): 0})
    for depth in range(1, len(ordered[-1]) + 1):
        own = [path for path in ordered if len(path) == depth]
        fed = [place for place, path in enumerate(own) if path in inner]
        levels.append(
            Level(
                parents=tuple(frontier[path[:-1]] for path in own),
                ranks=tuple(path[-1] for path in own),
                frontier=tuple(fed),
                numbers=tuple(number[path[:-1]] for path in own),
            )
        )
        frontier = {own[place]: at for at, place in enumerate(fed)}
    return tuple(levels)


def node_count(shape: TreeShape) -> int:
    """Of the tree of that shape, root included."""
    return 1 + sum(len(level.ranks) for level in levels_of(shape))


@dataclass(frozen=True)
class _LevelThere:
    """A level on a device, as indices. parents, ranks `[nodes]`; fed `[K]`: as `Level.frontier`; fed_parents `[K]`;
    ancestors bool `[K, above]`: of each, among the nodes that were fed on the levels so far, itself the last."""

    parents: Tensor
    ranks: Tensor
    fed: Tensor
    fed_parents: Tensor
    ancestors: Tensor


@cache
def _levels_there(shape: TreeShape, device: torch.device) -> tuple[_LevelThere, ...]:
    """Made once, not in every step."""
    found, ancestors = list[_LevelThere](), torch.zeros(1, 0, dtype=torch.bool)
    for level in levels_of(shape):
        parents, fed = torch.tensor(level.parents), torch.tensor(level.frontier, dtype=torch.long)
        ancestors = torch.cat([ancestors[parents[fed]], torch.eye(len(fed), dtype=torch.bool)], -1)
        tensors = (parents, torch.tensor(level.ranks), fed, parents[fed], ancestors)
        found.append(_LevelThere(*(tensor.to(device) for tensor in tensors)))
    return tuple(found)


class Static:
    """Grows (as a `Growth`) the tree of a shape for every row."""

    def __init__(self, shape: TreeShape, rows: int, device: torch.device) -> None:
        self._levels, self._there, self._rows = levels_of(shape), _levels_there(shape, device), rows
        self._tokens: list[Tensor] = []  # [B, nodes] a level

    def level(self, tokens_BPC: Tensor, log_q_BPC: Tensor, last: bool) -> Frontier | None:
        level = self._there[len(self._tokens)]
        tokens = tokens_BPC[:, level.parents, level.ranks.clamp(max=tokens_BPC.shape[-1] - 1)]
        self._tokens.append(tokens)
        if last or not len(level.fed):
            return None
        rows = (self._rows, -1)
        return Frontier(tokens[:, level.fed], level.fed_parents.expand(rows), level.ancestors.expand(*rows, -1))

    def trees(self, roots: Sequence[int], depths: Sequence[int]) -> list[Proposal]:
        tokens = torch.cat(self._tokens, 1).tolist()
        parents = [-1, *(parent for level in self._levels[: len(self._tokens)] for parent in level.numbers)]
        trees = [DraftTree([root, *own], parents) for root, own in zip(roots, tokens, strict=True)]
        return [Proposal(tree).up_to(depth) for tree, depth in zip(trees, depths, strict=True)]
