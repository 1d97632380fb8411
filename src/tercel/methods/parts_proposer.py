"""Drafts of a head whose parts all take the target's last hidden state (`last_hidden.py`).

Shapes, as suffixes of names: B rows, P nodes of a frontier and K of the next, C children of each, D depth, H
hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from tercel.decode.clock import PhaseClock
from tercel.decode.growth import Growth, Sized
from tercel.decode.head_state import likeliest
from tercel.decode.proposer import Proposer, Row
from tercel.decode.proposers import Parts
from tercel.decode.tree_policy import TreePolicy
from tercel.decode.types import Committed, Proposal
from tercel.draft.shape import WIDEST, TreeShape
from tercel.methods.last_hidden import LastHiddenHead
from tercel.methods.static_tree import Static, node_count
from tercel.target_model.output import TargetOutput


class PartsProposer(Proposer):
    """With a `shape` a static tree, as published: the likeliest paths of ranks in the Cartesian product of `top_k`
    drafts of each part (`static_tree.py`). Without one, what pays, node by node, by the head's own probabilities.

    No tree is deeper than the head has parts. A row's whole state is its newest hidden state.
    """

    head_class: ClassVar[type[LastHiddenHead]]
    head: LastHiddenHead
    rerun = 0  # of a prompt only the last token counts

    def __init__(self, parts: Parts) -> None:
        assert parts.head is not None
        draft, target = parts.head, parts.target
        self.draft, self.head, self.target = draft, draft.head_as(self.head_class), target
        self.feature_layers = self.head.config.feature_layers
        wanted = parts.shape or WIDEST.beside(target.tree_support.tree)
        children = min(wanted.top_k, self.head.config.draft_vocab_size)
        self.shape = TreeShape(children, min(wanted.depth, self.head.config.num_parts), wanted.nodes)
        self.max_nodes = node_count(self.shape)
        self.needs_tree = self.shape.top_k > 1
        self.widest = max(self.shape.top_k, self.shape.nodes // 4 if self.needs_tree else 1)  # most nodes of a level
        self.ids = draft.vocabulary.ids.to(target.device)
        self.clock = PhaseClock(target.device)  # until a loop brings its own
        self.policy: TreePolicy | None = None
        self._hidden: list[Tensor] = []  # `[H]` of each row's newest token that the target has read

    def timed_by(self, clock: PhaseClock) -> None:
        self.clock = clock

    def sized_by(self, policy: TreePolicy) -> None:
        self.policy = policy

    def reset(self, capacity: int) -> None:
        self._hidden = []

    def admit(self, rows: Sequence[Row], prompts: Sequence[TargetOutput]) -> None:
        self._hidden += [prompt.layers[0][0, -1] for prompt in prompts]

    def commit(self, committed: Sequence[Committed]) -> None:
        self._hidden = [known.layers[0][-1] for known in committed]

    def select_rows(self, rows: Sequence[int]) -> None:
        self._hidden = [self._hidden[row] for row in rows]

    @torch.no_grad()
    def propose(self, rows: Sequence[Row]) -> list[Proposal]:
        """A tree for every row:

            paths ← the root alone
            for every part of the head, as deep as the tree goes:
                children ← the C likeliest tokens that it says after each path
                paths ← those of them that are to have children: by rank, or as pays
        """
        device, shape = self.target.device, self.shape
        growth: Growth
        if self.policy is None:
            growth = Static(shape, len(rows), device)
        else:
            growth = Sized(self.policy.step, shape, self.widest, device)
        hidden_BH = torch.stack(self._hidden)
        paths_BPD = torch.tensor([[[row.tokens[-1]]] for row in rows], device=device)
        for depth in range(1, shape.depth + 1):
            with self.clock.phase("head"):
                log_q_BPC, tokens_BPC = self._children(hidden_BH, paths_BPD)
            frontier = growth.level(tokens_BPC, log_q_BPC, last=depth == shape.depth)
            if frontier is None:
                break
            above = frontier.parents[..., None].expand(-1, -1, depth)
            paths_BPD = torch.cat([paths_BPD.gather(1, above), frontier.tokens[..., None]], -1)
        return growth.trees([row.tokens[-1] for row in rows], [shape.depth] * len(rows))

    def _children(self, hidden_BH: Tensor, paths_BPD: Tensor) -> tuple[Tensor, Tensor]:
        """The likeliest tokens behind every path, the likeliest first, `[B, P, C]`: log q, and ids of the target."""
        step = paths_BPD.shape[-1] - 1
        if self.head.reads:
            hidden = hidden_BH[:, None].expand(-1, paths_BPD.shape[1], -1)
            output = self.head.output(step, hidden, self.target.embed(paths_BPD))
        else:
            output = self.head.output(step, hidden_BH[:, None], None)
        log_q, drafts = likeliest(self.head.logits(step, output).float(), self.shape.top_k)
        wide = (-1, paths_BPD.shape[1], -1)
        return log_q.expand(wide), self.ids[drafts].expand(wide)

