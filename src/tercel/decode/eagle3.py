"""EAGLE-3 drafts: the dynamic tree (paper section 3.1, EAGLE-2's tree, spec section 8).

Shapes, as suffixes of names: B rows, P nodes of a frontier and K of the next, C top-k, H head's hidden size, W draft
vocabulary, M nodes proposed so far, D nodes that were in frontiers so far.
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
from tercel.draft.shape import WIDEST, TreeShape
from tercel.target_model.transfer import to_device


class Eagle3(HeadProposer):
    """Drafts a dynamic tree with a head that drafts step by step; with `TreeShape.chain` its greedy chain.

    A tree has the shape that it is given, unless a policy says what pays: then that is the most it may have.
    """

    name = EAGLE3

    @torch.no_grad()
    def propose(self, rows: Sequence[Row]) -> list[Proposal]:
        """A tree for every row:

            frontier ← the root, which the head has read already
            for every level, until the deepest:
                children ← the C likeliest tokens after each of its nodes; score: the sum of log q along the path
                frontier ← the K best of these: as many as the shape has, or as pay
                feed the frontier through the head; a node sees the committed entries, its ancestors and itself
            tree ← the root, and the N - 1 best of all children ever proposed: as many as the shape has, or as pay

        All rows grow together, down to the deepest level that any of them may have (`depths`); each is cut at its own.
        """
        depths = self.depths(rows)
        if not any(depths):
            return [Proposal(DraftTree.root_only(row.tokens[-1])) for row in rows]
        self.catch_up()
        proposed = self._grow(max(depths))
        roots = [row.tokens[-1] for row in rows]
        if self.policy is None:
            return proposed.trees(roots, depths, self.shape.nodes)
        chances, nodes = self.policy.step.grown()
        return proposed.trees(roots, depths, min(nodes, self.shape.nodes), torch.from_numpy(chances))

    def _grow(self, levels: int) -> _Proposed:
        """All children proposed in `levels` levels, for every row."""
        output_B1H = self.state.output[:, None]
        count, device = len(output_B1H), output_B1H.device
        f = _Frontier(
            at=torch.full((count, 1), -1, device=device),
            scores=output_B1H.new_zeros(count, 1, dtype=torch.float32),
            output=output_B1H,
            ancestors=torch.zeros(count, 1, 0, dtype=torch.bool, device=device),
        )
        proposed = _Proposed()
        for depth in range(1, levels + 1):
            steps_BPC, drafts_BPC = self._log_q(f.output).topk(min(self.shape.top_k, len(self.ids)))
            tokens_BPC, scores_BPC = self.ids[drafts_BPC], f.scores[..., None] + steps_BPC
            first = proposed.add(tokens_BPC, scores_BPC, steps_BPC, f.at)
            next_BK = self._next(scores_BPC, steps_BPC, depth, depth == levels)
            if next_BK is None:
                break
            parents_BK1 = (next_BK // tokens_BPC.shape[-1])[..., None]  # where they stand in the old frontier
            fed_BPH = self.head.feedback(f.output)
            inherited_BKD = f.ancestors.gather(1, parents_BK1.expand(-1, -1, f.ancestors.shape[-1]))
            own_BKK = torch.eye(next_BK.shape[1], dtype=torch.bool, device=device).expand(count, -1, -1)
            ancestors_BKD = torch.cat([inherited_BKD, own_BKK], -1)
            tokens_BK = tokens_BPC.flatten(1).gather(1, next_BK)
            hidden_BKH = fed_BPH.gather(1, parents_BK1.expand(-1, -1, fed_BPH.shape[-1]))
            with self.clock.phase("head"):
                output_BKH = self.state.draft_level(tokens_BK, hidden_BKH, ancestors_BKD, depth)
            f = _Frontier(first + next_BK, scores_BPC.flatten(1).gather(1, next_BK), output_BKH, ancestors_BKD)
        return proposed

    def _next(self, scores_BPC: Tensor, steps_BPC: Tensor, depth: int, last: bool) -> Tensor | None:
        """Which of the children of each row are fed next, long `[B, K]`; None if no level is to follow."""
        if self.policy is None:
            flat_BM = scores_BPC.flatten(1)
            return None if last else flat_BM.topk(min(self.shape.top_k, flat_BM.shape[1])).indices
        chosen = self.policy.step.grow(steps_BPC.cpu().double().numpy(), depth, 0 if last else self.widest)
        return None if chosen is None else to_device(chosen.tolist(), scores_BPC.device)

    def _log_q(self, output: Tensor) -> Tensor:
        """`[.., H]` to the draft's log-probabilities `[.., W]`."""
        with self.clock.phase("head"):
            return self.state.log_q(output)


@dataclass(frozen=True)
class _Frontier:
    """The K nodes that the head has read last.

    at `[B, K]`: their indices among all proposed nodes, -1 for the root; scores `[B, K]`: sums of log q along their
    paths; output `[B, K, H]`: the head's, after them; ancestors bool `[B, K, D]`: which of the nodes that were in a
    frontier each sees, level by level; in the last one only itself.
    """

    at: Tensor
    scores: Tensor
    output: Tensor
    ancestors: Tensor


class _Proposed:
    """All nodes proposed so far, level by level: tokens, scores, log q and parents `[B, M]`; -1 is the root."""

    def __init__(self) -> None:
        self.tokens: list[Tensor] = []
        self.scores: list[Tensor] = []
        self.log_q: list[Tensor] = []
        self.parents: list[Tensor] = []
        self.levels: list[int] = []

    def add(self, tokens_BPC: Tensor, scores_BPC: Tensor, log_q_BPC: Tensor, parents_BP: Tensor) -> int:
        """A level: children of the nodes `parents`; returns the index of its first node."""
        first = sum(self.levels)
        self.tokens.append(tokens_BPC.flatten(1))
        self.scores.append(scores_BPC.flatten(1))
        self.log_q.append(log_q_BPC.flatten(1))
        self.parents.append(parents_BP[..., None].expand_as(tokens_BPC).flatten(1))
        self.levels.append(tokens_BPC[0].numel())
        return first

    def trees(
        self, roots: Sequence[int], depths: Sequence[int], nodes: int, chances_BM: Tensor | None = None
    ) -> list[Proposal]:
        """For each row the best `nodes - 1` of its nodes down to its depth, after its root; on the host. Best by their
        scores, or by `chances_BM`.

        All rows' nodes leave the device in one copy, the bits of their scores as integers.
        """
        bits = [torch.cat(numbers, -1).view(torch.int32).long() for numbers in (self.scores, self.log_q)]
        together = torch.stack([torch.cat(self.tokens, -1), torch.cat(self.parents, -1), *bits]).cpu()
        tokens, parents = together[:2]
        scores, log_q = (number.int().view(torch.float32) for number in together[2:])
        best = scores if chances_BM is None else chances_BM
        levels = torch.repeat_interleave(torch.arange(1, len(self.levels) + 1), torch.tensor(self.levels))
        trees = []
        for row, (root, depth) in enumerate(zip(roots, depths, strict=True)):
            near = sum(self.levels[:depth])
            chosen = select_best(best[row, :near], levels[:near], parents[row, :near], nodes - 1)
            drafted = torch.cat([torch.tensor([root]), tokens[row, chosen.indices]])
            tree = DraftTree(drafted, torch.cat([torch.tensor([-1]), chosen.parents]))
            own = torch.cat([torch.zeros(1), log_q[row, chosen.indices]])
            trees.append(Proposal(tree, log_q=own.double().numpy()))
        return trees


def _make(parts: Parts) -> Eagle3:
    assert parts.head is not None
    shape = parts.shape or (WIDEST if parts.target.tree_support.tree else TreeShape.chain(WIDEST.depth))
    return Eagle3(parts.head, parts.target, shape)


KIND = ProposerKind(_make, needs=("head",))
