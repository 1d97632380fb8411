"""EAGLE-3 drafts: the dynamic tree (paper section 3.1, EAGLE-2's tree, spec section 8), and the sampled chain.

The head's cache holds one entry for every committed token but the first: slot `t` is row `t` (feature `f_t`, token
`x[t+1]`) at head position `t`. Entries of committed tokens always come from the target's true features; those of
drafted nodes lie behind them while a tree grows and are overwritten afterwards.

Shape legend: B rows, K top-k, H head's hidden size, W draft vocabulary, S slots, q/kv heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tercel.decode.draft_tree import DraftTree, select_best
from tercel.decode.proposer import Row
from tercel.decode.sampling import RandomStream, sample
from tercel.decode.types import Committed, Proposal
from tercel.draft import DraftModel
from tercel.draft.alignment import head_position, rope_position, token_in
from tercel.errors import TercelError
from tercel.target_model.cache import TargetCache
from tercel.target_model.masks import additive, visible_slots
from tercel.target_model.model import Target, TargetOutput
from tercel.target_model.transfer import to_device


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


class HeadState:
    """The head's side of every row: its cache and its last output."""

    def __init__(self, draft: DraftModel, target: Target, capacity: int) -> None:
        self.head, self.target = draft.head, target
        self.capacity = capacity
        self.positions = draft.head.config.max_position_embeddings
        self.cache: TargetCache | None = None
        self.output = torch.empty(0)  # [B, H]: of each row's newest entry, which predicts the root's children

    def embed(self, tokens: Tensor) -> Tensor:
        return self.head.embed_tokens(tokens) if self.head.config.own_embeddings else self.target.embed(tokens)

    def extend(self, cache: TargetCache, layers: Sequence[Tensor], entries: Sequence[Sequence[int]]) -> Tensor:
        """Write entries of committed tokens: true features `[B, T, Ht]` a layer, and each row's tokens after them, up
        to `T`. Returns the output `[B, H]` of each row's last.

        Only that last entry needs a query: the others are never drafted from.
        """
        rows, length = len(entries), max(map(len, entries))
        packed = to_device([[len(row), *row, *[0] * (length - len(row))] for row in entries], self.target.device)
        last, tokens = packed[:, 0] - 1, packed[:, 1:]
        fused = self.head.fuse(torch.cat(list(layers), dim=-1))
        before = cache.starts(tokens.device)
        slots = before[:, None] + torch.arange(length, device=tokens.device)  # of the entries: the rows' indices
        positions = self._known(head_position(token_in(slots, 0)))
        now = self.head.project(self.embed(tokens), fused, positions)
        cache.begin(length, tokens.device)
        keys, values = cache.update(now.key.transpose(1, 2), now.value.transpose(1, 2), 0)
        every = torch.arange(rows, device=tokens.device)
        cache.keep([range(len(row)) for row in entries])
        slots = torch.arange(keys.shape[2], device=tokens.device)
        seen = slots[None, None] < (before + last + 1)[:, None, None]  # [B, 1, S]
        attended = _attend(now.query[every, last][:, None], keys, values, seen)[:, 0]
        return self.head.finish(now.residual[every, last], attended)

    def draft_level(self, tokens: Tensor, hidden: Tensor, within: Tensor, depth: int) -> Tensor:
        """Entries for drafted nodes `[B, K]` at `depth`, `hidden` `[B, K, H]` from their parents, `within`
        `[B, K, depth*K]` the drafted slots each sees. Returns their outputs `[B, K, H]`."""
        assert self.cache is not None
        width = tokens.shape[1]
        newest = self.cache.starts(tokens.device) - 1  # the row that drafts, whose step `depth` this is
        positions = self._known(rope_position(newest, depth))[:, None].expand(-1, width)
        now = self.head.project(self.embed(tokens), hidden, positions)
        self.cache.begin(width, tokens.device, uncommitted=(depth - 1) * width)
        keys, values = self.cache.update(now.key.transpose(1, 2), now.value.transpose(1, 2), 0)
        seen = visible_slots(self.cache.lengths, within)
        return self.head.finish(now.residual, _attend(now.query, keys, values, seen))

    def _known(self, positions: Tensor) -> Tensor:
        """Entries past the head's last position keep that one: nothing is drafted from them."""
        return positions.clamp(max=self.positions - 1)


def _attend(query: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> Tensor:
    """query `[B, T, q, D]`, keys/values `[B, kv, S, D]`, seen bool `[B, T, S]` → `[B, T, q*D]`.

    The query heads of a key head are laid side by side as rows, so keys are never repeated.
    """
    rows, length, heads, size = query.shape
    kv = keys.shape[1]
    grouped = query.view(rows, length, kv, heads // kv, size).permute(0, 2, 3, 1, 4).reshape(rows, kv, -1, size)
    mask = additive(seen, query.dtype).repeat(1, 1, heads // kv, 1)
    out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
    return out.view(rows, kv, heads // kv, length, size).permute(0, 3, 1, 2, 4).reshape(rows, length, -1)


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


class SampledChain(Eagle3):
    """A chain whose tokens are *drawn* from the draft's distribution (at the request's temperature), for the
    rejection rule `min(1, p/q)`; at temperature 0 the greedy chain."""

    name = "eagle3-sampled-chain"

    def __init__(self, draft: DraftModel, target: Target, depth: int) -> None:
        super().__init__(draft, target, TreeShape.chain(depth))
        self._host_ids = draft.vocabulary.ids.cpu()

    @torch.no_grad()
    def propose(self, rows: Sequence[Row]) -> list[Proposal]:
        state, head, device, depths = self.state, self.draft.head, self.target.device, self.depths(rows)
        drawn: list[list[int]] = [[] for _ in rows]
        drawn_from: list[list[Tensor]] = [[] for _ in rows]
        output = state.output
        within = torch.zeros(len(rows), 1, 0, dtype=torch.bool, device=device)
        for depth in range(1, max(depths) + 1):
            logits = head.logits(output).cpu().double()  # [B, W], on the host: drawing is done there
            for i, row in enumerate(rows):
                if depth <= depths[i]:
                    token, q = self._draw(logits[i], row, depth)
                    drawn[i].append(token)
                    drawn_from[i].append(q)
            if depth < max(depths):
                tokens = to_device([[tokens[-1] if tokens else 0] for tokens in drawn], device)
                within = torch.cat([within, within.new_ones(len(rows), 1, 1)], -1)
                output = state.draft_level(tokens, head.feedback(output)[:, None], within, depth)[:, 0]
        return [
            Proposal(
                DraftTree.chain(row.tokens[-1], tokens),
                None if row.params.greedy else self._distributions(qs),
            )
            for row, tokens, qs in zip(rows, drawn, drawn_from, strict=True)
        ]

    def _draw(self, logits: Tensor, row: Row, depth: int) -> tuple[int, Tensor]:
        if row.params.greedy:
            return int(self._host_ids[logits.argmax()]), logits
        q = torch.softmax(logits / row.params.temperature, -1)
        drafts: RandomStream = row.stream.for_drafts()
        return int(self._host_ids[sample(q, drafts.uniform(len(row.tokens) + depth))]), q

    def _distributions(self, qs: list[Tensor]) -> Callable[[int], Tensor]:
        def of(node: int) -> Tensor:
            wide = torch.zeros(self.target.vocab_size, dtype=torch.float64)
            return wide.index_copy_(0, self._host_ids, qs[node])

        return of
