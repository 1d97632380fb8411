"""EAGLE-3 drafts: the dynamic tree (paper section 3.1, EAGLE-2's tree, spec section 8).

Shape legend: B rows, K top-k, H head's hidden size, W draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tercel.decode.draft_tree import DraftTree, select_best
from tercel.decode.head_state import HeadState
from tercel.decode.proposer import Row
from tercel.decode.types import Committed, Proposal
from tercel.draft import DraftModel
from tercel.draft.alignment import head_position, token_in
from tercel.draft.shape import TreeShape
from tercel.target_model.cache import TargetCache
from tercel.target_model.model import Target, TargetOutput
from tercel.target_model.transfer import to_device


class Eagle3:
    """Drafts a dynamic tree with an EAGLE-3 head; with `TreeShape.chain` its greedy chain."""

    name = "eagle3"

    def __init__(self, draft: DraftModel, target: Target, shape: TreeShape | None = None) -> None:
        self.draft = draft
        self.shape = shape or TreeShape.for_device(target.device)
        self.target = target
        self.feature_layers = draft.head.config.feature_layers
        self.max_nodes = self.shape.nodes
        self.needs_tree = self.shape.top_k > 1
        self.positions = draft.head.config.max_position_embeddings
        self.limited = False  # whether drafting ever stopped for want of positions
        self._ids = draft.vocabulary.ids.to(target.device)
        self.state = HeadState(draft, target, 0)

    def reset(self, capacity: int) -> None:
        # a level is drafted behind the committed entries before it is thrown away
        self.state = HeadState(self.draft, self.target, capacity + self.shape.top_k * self.shape.depth)

    @torch.no_grad()
    def admit(self, row: Row, prompt: TargetOutput) -> None:
        state = self.state
        own = TargetCache(1, state.capacity)
        output = state.extend(own, prompt.layers, [row.tokens[token_in(0, 0) :]])  # row 0 reads the first of them
        if state.cache is None:
            state.cache, state.output = own, output
        else:
            state.cache.add_row(own)
            state.output = torch.cat([state.output, output])

    @torch.no_grad()
    def commit(self, committed: Sequence[Committed]) -> None:
        assert self.state.cache is not None
        width = max(len(c.tokens) for c in committed)
        layers = [
            torch.stack([F.pad(c.layers[i], (0, 0, 0, width - len(c.tokens))) for c in committed])
            for i in range(len(self.feature_layers))
        ]
        self.state.output = self.state.extend(self.state.cache, layers, [c.tokens for c in committed])

    def select_rows(self, rows: Sequence[int]) -> None:
        if self.state.cache is not None:
            self.state.cache.select_rows(rows)
            self.state.output = self.state.output[to_device(list(rows), self.target.device).long()]

    def depths(self, rows: Sequence[Row]) -> list[int]:
        """How deep each row's draft may go: every level hangs on entries one position further on, the first on the
        root's, and past its last position the head drafts nothing."""
        roots = [head_position(len(row.tokens) - 1) for row in rows]
        depths = [max(0, min(self.shape.depth, self.positions - root)) for root in roots]
        self.limited = self.limited or min(depths) < self.shape.depth
        return depths

    @torch.no_grad()
    def propose(self, rows: Sequence[Row]) -> list[Proposal]:
        shape, state, head, depths = self.shape, self.state, self.draft.head, self.depths(rows)
        if not any(depths):
            return [Proposal(DraftTree.root_only(row.tokens[-1])) for row in rows]
        count, width, device = len(rows), min(shape.top_k, len(self._ids)), self.target.device
        log_q = torch.log_softmax(head.logits(state.output).float(), -1)  # [B, W]
        scores, drafts = log_q.topk(width)  # [B, K], the frontier: the best K nodes of the newest level
        hidden = head.feedback(state.output)[:, None].expand(-1, width, -1)
        within = torch.eye(width, dtype=torch.bool, device=device).expand(count, -1, -1)
        at = torch.arange(width, device=device).expand(count, -1)  # the frontier's indices among all proposed nodes
        proposed = _Proposed(self._ids[drafts], scores)
        for depth in range(1, max(depths)):
            output = state.draft_level(self._ids[drafts], hidden, within, depth)
            log_q = torch.log_softmax(head.logits(output).float(), -1)  # [B, K, W]
            step, choices = log_q.topk(width)  # [B, K, K]
            first = proposed.add(self._ids[choices], scores[..., None] + step, at)
            best, flat = (scores[..., None] + step).flatten(1).topk(width)  # of all K * K
            parent = flat // width  # [B, K] into the old frontier
            scores, drafts, at = best, choices.flatten(1).gather(1, flat), first + flat
            hidden = head.feedback(output).gather(1, parent[..., None].expand(-1, -1, output.shape[-1]))
            inherited = within.gather(1, parent[..., None].expand(-1, -1, within.shape[-1]))
            within = torch.cat([inherited, torch.eye(width, dtype=torch.bool, device=device).expand(count, -1, -1)], -1)
        roots = [row.tokens[-1] for row in rows]
        return [Proposal(tree) for tree in proposed.trees(roots, depths, shape.nodes)]


class _Proposed:
    """All nodes proposed so far, level by level: tokens, scores and parents `[B, M]`, depths `[M]`."""

    def __init__(self, tokens: Tensor, scores: Tensor) -> None:
        self.tokens, self.scores = [tokens], [scores]
        self.parents = [torch.full_like(tokens, -1)]
        self.count = tokens.shape[1]
        self.levels = [self.count]

    def add(self, tokens: Tensor, scores: Tensor, parents: Tensor) -> int:
        """A level `[B, K, K]`, children of the nodes `parents` `[B, K]`; returns the index of its first node."""
        self.tokens.append(tokens.flatten(1))
        self.scores.append(scores.flatten(1))
        self.parents.append(parents[..., None].expand_as(tokens).flatten(1))
        first = self.count
        self.levels.append(tokens[0].numel())
        self.count += self.levels[-1]
        return first

    def trees(self, roots: Sequence[int], depths: Sequence[int], nodes: int) -> list[DraftTree]:
        """For each row the best `nodes - 1` of its nodes down to its depth, behind its root; on the host.

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
            trees.append(
                DraftTree(
                    torch.cat([torch.tensor([root]), tokens[row, chosen.indices]]),
                    torch.cat([torch.tensor([-1]), chosen.parents]),
                    torch.cat([torch.ones(1), scores[row, chosen.indices].exp()]),
                )
            )
        return trees
