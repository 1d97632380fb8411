"""A head's trees while they grow: which drafts stand where, and which are fed to the head next (spec section 8).

Where trees have a shape, the numbers stay on the device until the last level; where they are as large as pays, that is
settled on the host at every level, and so is all else.

Shapes, as suffixes of names: B rows, P nodes of a frontier and K of the next, C children of each, M nodes proposed so
far, D nodes that were in frontiers so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from tercel.decode.chances import Ints
from tercel.decode.draft_tree import DraftTree, select_best
from tercel.decode.rising import Floats
from tercel.decode.tree_policy import Step
from tercel.decode.types import Proposal
from tercel.draft.shape import TreeShape
from tercel.target_model.transfer import to_device


class Frontier(NamedTuple):
    """Nodes that are to be fed: tokens `[B, K]`; parents `[B, K]`, places in the frontier before; ancestors bool
    `[B, K, D]`, which of the nodes that were in a frontier each sees, level by level; in the last one only itself."""

    tokens: Tensor
    parents: Tensor
    ancestors: Tensor


class Growth(Protocol):
    """The trees of all rows, level by level."""

    def level(self, tokens_BPC: Tensor, log_q_BPC: Tensor, last: bool) -> Frontier | None:
        """Children of the frontier, the root's first: the likeliest first. Returns the next one; None if no level is
        to follow, as after the `last`."""
        ...

    def trees(self, roots: Sequence[int], depths: Sequence[int]) -> list[Proposal]:
        """For each row the best of its nodes down to its depth, after its root."""
        ...


class Shaped:
    """Trees of one shape: the K best children are fed, and the best N - 1 of all nodes are proposed, by the sums of
    log q along their paths."""

    def __init__(self, shape: TreeShape, rows: int, device: torch.device) -> None:
        self._shape = shape
        self._at = torch.full((rows, 1), -1, device=device)  # where the frontier's nodes stand among all
        self._scores = torch.zeros(rows, 1, device=device)  # theirs
        self._ancestors = torch.zeros(rows, 1, 0, dtype=torch.bool, device=device)
        # all nodes so far, level by level, [B, P*C] each: tokens, parents, scores and log q
        self._proposed: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        self._sizes: list[int] = []

    def level(self, tokens_BPC: Tensor, log_q_BPC: Tensor, last: bool) -> Frontier | None:
        scores_BPC, first = self._scores[..., None] + log_q_BPC, sum(self._sizes)
        parents_BPC = self._at[..., None].expand_as(tokens_BPC)
        level = [part.flatten(1) for part in (tokens_BPC, parents_BPC, scores_BPC, log_q_BPC)]
        self._proposed.append((level[0], level[1], level[2], level[3]))
        self._sizes.append(tokens_BPC[0].numel())
        if last:
            return None
        tokens, scores = level[0], level[2]
        next_BK = scores.topk(min(self._shape.top_k, scores.shape[1])).indices
        parents_BK = next_BK // tokens_BPC.shape[-1]
        inherited = self._ancestors.gather(1, parents_BK[..., None].expand(-1, -1, self._ancestors.shape[-1]))
        own = torch.eye(next_BK.shape[1], dtype=torch.bool, device=next_BK.device).expand(len(next_BK), -1, -1)
        self._at, self._scores = first + next_BK, scores.gather(1, next_BK)
        self._ancestors = torch.cat([inherited, own], -1)
        return Frontier(tokens.gather(1, next_BK), parents_BK, self._ancestors)

    def trees(self, roots: Sequence[int], depths: Sequence[int]) -> list[Proposal]:
        """All rows' nodes leave the device in one copy, the bits of their scores as integers."""
        parts = [torch.cat(numbers, -1) for numbers in zip(*self._proposed, strict=True)]
        bits = [numbers.view(torch.int32).long() for numbers in parts[2:]]
        together = torch.stack([*parts[:2], *bits]).cpu()
        tokens, parents = together[:2]
        scores, log_q = (number.int().view(torch.float32) for number in together[2:])
        levels = torch.repeat_interleave(torch.arange(1, len(self._sizes) + 1), torch.tensor(self._sizes))
        proposals = []
        for row, (root, depth) in enumerate(zip(roots, depths, strict=True)):
            near = sum(self._sizes[:depth])
            chosen = select_best(scores[row, :near], levels[:near], parents[row, :near], self._shape.nodes - 1)
            tree = DraftTree([root, *tokens[row, chosen.indices].tolist()], [-1, *chosen.parents.tolist()])
            own = torch.cat([torch.zeros(1), log_q[row, chosen.indices]])
            proposals.append(Proposal(tree, log_q=own.double().numpy()))
        return proposals


class Sized:
    """Trees as large as pays. step: says what does. shape: the most they may have. widest: most nodes of a level."""

    def __init__(self, step: Step, shape: TreeShape, widest: int, device: torch.device) -> None:
        self._step, self._shape, self._widest, self._device = step, shape, widest, device
        self._rows = np.arange(step.rows)[:, None]
        self._at: Ints = np.full((step.rows, 1), -1)  # where the frontier's nodes stand among all
        self._ancestors = np.zeros((step.rows, 1, 0), bool)
        # all nodes so far, level by level, [B, P*C] each: tokens, parents and log q
        self._tokens: list[Ints] = []
        self._parents: list[Ints] = []
        self._log_q: list[Floats] = []

    def level(self, tokens_BPC: Tensor, log_q_BPC: Tensor, last: bool) -> Frontier | None:
        rows, children = len(tokens_BPC), tokens_BPC.shape[-1]
        first = sum(level.shape[1] for level in self._tokens)
        tokens: Ints = tokens_BPC.cpu().numpy().reshape(rows, -1)
        log_q = log_q_BPC.cpu().double().numpy()
        self._tokens.append(tokens)
        self._parents.append(self._at.repeat(children, 1))
        self._log_q.append(log_q.reshape(rows, -1))
        chosen = self._step.grow(log_q, len(self._tokens), 0 if last else self._widest)
        if chosen is None:
            return None
        before, width = chosen // children, chosen.shape[1]
        self._at = first + chosen
        inherited, own = self._ancestors[self._rows, before], np.eye(width, dtype=bool)
        self._ancestors = np.concatenate([inherited, np.broadcast_to(own, (rows, width, width))], 2)
        there = [torch.from_numpy(part) for part in (tokens[self._rows, chosen], before, self._ancestors)]
        return Frontier(*(to_device(part, self._device) for part in there))

    def trees(self, roots: Sequence[int], depths: Sequence[int]) -> list[Proposal]:
        """Best by the chances of whole paths, then by depth: a child's is never above its parent's."""
        tokens, parents, log_q = (np.concatenate(levels, 1) for levels in (self._tokens, self._parents, self._log_q))
        within = [sum(level.shape[1] for level in self._tokens[:depth]) for depth in depths]
        chances, nodes = self._step.grown(within)
        best = (-chances).argsort(1, kind="stable")[:, : min(nodes, self._shape.nodes) - 1]
        places = np.zeros((len(tokens), tokens.shape[1] + 1), np.int64)  # in the tree; the last of them the root's
        proposals = []
        for row, (root, count) in enumerate(zip(roots, within, strict=True)):
            kept = np.sort(best[row])
            kept = kept[: kept.searchsorted(count)]
            places[row, kept] = np.arange(1, len(kept) + 1)
            tree = DraftTree([root, *tokens[row, kept].tolist()], [-1, *places[row, parents[row, kept]].tolist()])
            proposals.append(Proposal(tree, log_q=np.concatenate([[0.0], log_q[row, kept]])))
        return proposals
