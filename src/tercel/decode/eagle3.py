"""EAGLE-3 drafts: the dynamic tree (paper section 3.1, EAGLE-2's tree, spec section 8).

Shapes, as suffixes of names: B rows, P nodes of a frontier and K of the next, C top-k, H head's hidden size, W draft
vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tercel.decode.draft_tree import DraftTree
from tercel.decode.growth import Growth, Shaped, Sized
from tercel.decode.head_proposer import HeadProposer
from tercel.decode.proposer import Row
from tercel.decode.proposers import EAGLE3, Parts, ProposerKind
from tercel.decode.types import Proposal
from tercel.draft.shape import WIDEST


class Eagle3(HeadProposer):
    """Drafts a dynamic tree with a head that drafts step by step; with `TreeShape.chain` its greedy chain.

    A tree has the shape that it is given, unless a policy says what pays: then that is the most it may have.
    """

    name = EAGLE3

    def new_growth(self, rows: int) -> Growth:
        """Of the trees of so many rows, for one step."""
        if self.policy is None:
            return Shaped(self.shape, rows, self.target.device)
        return Sized(self.policy.step, self.shape, self.widest, self.target.device)

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
        growth = self.new_growth(len(rows))
        output_BPH = self.state.output[:, None]
        for depth in range(1, max(depths) + 1):
            with self.clock.phase("head"):
                log_q_BPC, drafts_BPC = self.state.best(output_BPH, self.shape.top_k, depth)
            frontier = growth.level(self.ids[drafts_BPC], log_q_BPC, last=depth == max(depths))
            if frontier is None:
                break
            fed_BPH, parents_BK1 = self.head.feedback(output_BPH), frontier.parents[..., None]
            hidden_BKH = fed_BPH.gather(1, parents_BK1.expand(-1, -1, fed_BPH.shape[-1]))
            with self.clock.phase("head"):
                output_BPH = self.state.draft_level(frontier.tokens, hidden_BKH, frontier.ancestors, depth)
        return growth.trees([row.tokens[-1] for row in rows], depths)


def _make(parts: Parts) -> Eagle3:
    assert parts.head is not None
    return Eagle3(parts.head, parts.target, parts.shape or WIDEST.beside(parts.target.tree_support.tree))


KIND = ProposerKind(_make, needs=("head",), about="a draft head: a tree as large as pays (arXiv 2503.01840)")
