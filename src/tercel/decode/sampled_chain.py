"""Chains that are drawn from the head's distribution, for the rejection rule of spec section 9."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tercel.decode.draft_tree import DraftTree
from tercel.decode.eagle3 import Eagle3
from tercel.decode.proposer import Row
from tercel.decode.sampling import RandomStream, sample
from tercel.decode.types import Proposal
from tercel.draft import DraftModel
from tercel.draft.shape import TreeShape
from tercel.target_model.model import Target
from tercel.target_model.transfer import to_device


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
