"""EAGLE-3 drafts: the dynamic tree (paper section 3.1, EAGLE-2's tree, spec section 8).

Shapes, as suffixes of names: B rows, K top-k, H head's hidden size, W draft vocabulary, M nodes proposed so far,
D = depth * K nodes that were frontiers so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tercel.decode.draft_tree import DraftTree, select_best
from tercel.decode.head_proposer import HeadProposer
from tercel.decode.proposer import Row
from tercel.decode.proposers import EAGLE3, Parts, ProposerKind
from tercel.decode.types import Proposal


class Eagle3(HeadProposer):
    """Drafts a dynamic tree with a head that drafts step by step; with `TreeShape.chain` its greedy chain."""

    name = EAGLE3

    @torch.no_grad()
    def propose(self, rows: Sequence[Row]) -> list[Proposal]:
        """A tree for every row:

            frontier ← the K likeliest children of the root
            for every level below, until the deepest:
                feed the frontier through the head; a node sees the committed entries, its ancestors and itself
                children ← the K likeliest tokens after each of its nodes; score: the sum of log q along the path
                frontier ← the K best of these K * K
            tree ← the root, and the N - 1 best of all children ever proposed

        All rows grow together, down to the deepest level that any of them may have (`depths`); each is cut at its own.
        """
        depths = self.depths(rows)
        if not any(depths):
            return [Proposal(DraftTree.root_only(row.tokens[-1])) for row in rows]
        proposed = self._grow(max(depths))
        trees = proposed.trees([row.tokens[-1] for row in rows], depths, self.shape.nodes)
        return [Proposal(tree) for tree in trees]

    def _grow(self, levels: int) -> _Proposed:
        """All children proposed in `levels` levels, for every row."""
        output_BH = self.state.output
        scores_BK, drafts_BK = self._log_q(output_BH).topk(min(self.shape.top_k, len(self.ids)))
        tokens_BK = self.ids[drafts_BK]
        count, width = tokens_BK.shape
        own_BKK = torch.eye(width, dtype=torch.bool, device=tokens_BK.device).expand(count, -1, -1)
        proposed = _Proposed(tokens_BK, scores_BK)
        frontier = _Frontier(
            at=torch.arange(width, device=tokens_BK.device).expand(count, -1),
            tokens=tokens_BK,
            scores=scores_BK,
            hidden=self.head.feedback(output_BH)[:, None].expand(-1, width, -1),
            ancestors=own_BKK,
        )
        for depth in range(1, levels):
            f = frontier
            with self.clock.phase("head"):
                output_BKH = self.state.draft_level(f.tokens, f.hidden, f.ancestors, depth)
            steps_BKK, drafts_BKK = self._log_q(output_BKH).topk(width)
            tokens_BKK, scores_BKK = self.ids[drafts_BKK], f.scores[..., None] + steps_BKK
            first = proposed.add(tokens_BKK, scores_BKK, f.at)
            scores_BK, flat_BK = scores_BKK.flatten(1).topk(width)  # of all K * K
            parents_BK1 = (flat_BK // width)[..., None]  # where they stand in the old frontier
            fed_BKH = self.head.feedback(output_BKH)
            inherited_BKD = f.ancestors.gather(1, parents_BK1.expand(-1, -1, f.ancestors.shape[-1]))
            frontier = _Frontier(
                at=first + flat_BK,
                tokens=tokens_BKK.flatten(1).gather(1, flat_BK),
                scores=scores_BK,
                hidden=fed_BKH.gather(1, parents_BK1.expand(-1, -1, fed_BKH.shape[-1])),
                ancestors=torch.cat([inherited_BKD, own_BKK], -1),
            )
        return proposed

    def _log_q(self, output: Tensor) -> Tensor:
        """`[.., H]` to the draft's log-probabilities `[.., W]`."""
        with self.clock.phase("head"):
            return self.state.log_q(output)


@dataclass(frozen=True)
class _Frontier:
    """The K best nodes of the newest level.

    at `[B, K]`: their indices among all proposed nodes; tokens `[B, K]`: the target's ids; scores `[B, K]`: sums of
    log q along their paths; hidden `[B, K, H]`: what the head is fed with beside the token, of their parents; ancestors
    bool `[B, K, D]`: which of the nodes that were in a frontier each sees, level by level; in the last one only itself.
    """

    at: Tensor
    tokens: Tensor
    scores: Tensor
    hidden: Tensor
    ancestors: Tensor


class _Proposed:
    """All nodes proposed so far, level by level: tokens, scores and parents `[B, M]`; -1 is the root."""

    def __init__(self, tokens_BK: Tensor, scores_BK: Tensor) -> None:
        self.tokens, self.scores = [tokens_BK], [scores_BK]
        self.parents = [torch.full_like(tokens_BK, -1)]
        self.levels = [tokens_BK.shape[1]]

    def add(self, tokens_BKK: Tensor, scores_BKK: Tensor, parents_BK: Tensor) -> int:
        """A level: children of the nodes `parents`; returns the index of its first node."""
        first = sum(self.levels)
        self.tokens.append(tokens_BKK.flatten(1))
        self.scores.append(scores_BKK.flatten(1))
        self.parents.append(parents_BK[..., None].expand_as(tokens_BKK).flatten(1))
        self.levels.append(tokens_BKK[0].numel())
        return first

    def trees(self, roots: Sequence[int], depths: Sequence[int], nodes: int) -> list[DraftTree]:
        """For each row the best `nodes - 1` of its nodes down to its depth, after its root; on the host.

        All rows' nodes leave the device in one copy, the bits of their scores as integers.
        """
        tokens, parents, scores = (torch.cat(levels, -1) for levels in (self.tokens, self.parents, self.scores))
        tokens, parents, bits = torch.stack([tokens, parents, scores.view(torch.int32).long()]).cpu()
        scores = bits.int().view(torch.float32)
        levels = torch.repeat_interleave(torch.arange(1, len(self.levels) + 1), torch.tensor(self.levels))
        trees = []
        for row, (root, depth) in enumerate(zip(roots, depths, strict=True)):
            near = sum(self.levels[:depth])
            chosen = select_best(scores[row, :near], levels[:near], parents[row, :near], nodes - 1)
            drafted = torch.cat([torch.tensor([root]), tokens[row, chosen.indices]])
            trees.append(DraftTree(drafted, torch.cat([torch.tensor([-1]), chosen.parents])))
        return trees


def _make(parts: Parts) -> Eagle3:
    assert parts.head is not None
    return Eagle3(parts.head, parts.target, parts.shape)


KIND = ProposerKind(_make, needs=("head",))
