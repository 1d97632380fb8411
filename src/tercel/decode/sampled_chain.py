"""Chains that are drawn from the head's distribution, for the rejection rule of spec section 9."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tercel.decode.draft_tree import DraftTree
from tercel.decode.head_proposer import HeadProposer
from tercel.decode.proposer import Row
from tercel.decode.proposers import SAMPLED_CHAIN, Parts, ProposerKind
from tercel.decode.sampling import sample
from tercel.decode.types import Proposal
from tercel.draft import DraftModel
from tercel.draft.shape import WIDEST, TreeShape
from tercel.target_model.protocol import TargetModel
from tercel.target_model.transfer import to_device


class SampledChain(HeadProposer):
    """A chain whose tokens are *drawn* from the draft's distribution (at the request's temperature), for the
    rejection rule `min(1, p/q)`; at temperature 0 the greedy chain."""

    name = SAMPLED_CHAIN

    def __init__(self, draft: DraftModel, target: TargetModel, depth: int) -> None:
        super().__init__(draft, target, TreeShape.chain(depth))
        self._host_ids = draft.vocabulary.ids.cpu()

    @torch.no_grad()
    def propose(self, rows: Sequence[Row]) -> list[Proposal]:
        """A chain for every row:

            repeat until the chain is long enough (which no drawn token has a part in):
                q ← the draft's distribution after the last token of the chain, at the request's temperature
                draw the next token from q, and keep q: verification divides by it
                feed it through the head; it sees the committed entries and the chain

        Shapes, as suffixes of names: B rows, H head's hidden size, W draft vocabulary, D tokens drafted so far.
        """
        longest = self.shape.depth if self.policy is None else self.policy.step.chain_depth(self.shape.depth)
        depths = [min(longest, depth) for depth in self.depths(rows)]
        if not any(depths):
            return [Proposal(DraftTree.root_only(row.tokens[-1])) for row in rows]
        self.catch_up()
        drawn: list[list[int]] = [[] for _ in rows]
        drawn_from: list[list[Tensor]] = [[] for _ in rows]
        output_BH = self.state.output
        chain_B1D = torch.zeros(len(rows), 1, 0, dtype=torch.bool, device=self.target.device)
        for depth in range(1, max(depths) + 1):
            with self.clock.phase("head"):
                logits_BW = self.head.logits(output_BH).cpu().double()  # on the host: drawing is done there
            for i, row in enumerate(rows):
                if depth <= depths[i] and not logits_BW[i].isfinite().all():
                    depths[i] = depth - 1  # a head that overflows drafts no more; the target goes on
                if depth <= depths[i]:
                    token, q_W = self._draw(logits_BW[i], row, depth)
                    drawn[i].append(token)
                    drawn_from[i].append(q_W)
            if depth < max(depths):
                # a row whose chain is over goes along with a token that is never proposed
                tokens_B1 = to_device([[tokens[-1] if tokens else 0] for tokens in drawn], self.target.device)
                chain_B1D = torch.cat([chain_B1D, chain_B1D.new_ones(len(rows), 1, 1)], -1)
                fed_B1H = self.head.feedback(output_BH)[:, None]
                with self.clock.phase("head"):
                    output_BH = self.state.draft_level(tokens_B1, fed_B1H, chain_B1D, depth)[:, 0]
        return [
            Proposal(
                DraftTree.chain(row.tokens[-1], tokens),
                None if row.params.greedy else self._distributions(qs),
            )
            for row, tokens, qs in zip(rows, drawn, drawn_from, strict=True)
        ]

    def _draw(self, logits_W: Tensor, row: Row, depth: int) -> tuple[int, Tensor]:
        """The token at `depth`, and the distribution over the draft vocabulary that it was drawn from."""
        if row.params.greedy:
            return int(self._host_ids[logits_W.argmax()]), logits_W
        q_W = torch.softmax(logits_W / row.params.temperature, -1)
        number = row.stream.for_drafts().uniform(len(row.tokens) + depth)
        return int(self._host_ids[sample(q_W, number)]), q_W

    def _distributions(self, qs: list[Tensor]) -> Callable[[int], Tensor]:
        """`node` to `[V]`: what its child was drawn from, over the target's vocabulary."""

        def of(node: int) -> Tensor:
            wide = torch.zeros(self.target.vocab_size, dtype=torch.float64)
            return wide.index_copy_(0, self._host_ids, qs[node])

        return of


def _make(parts: Parts) -> SampledChain:
    assert parts.head is not None
    return SampledChain(parts.head, parts.target, (parts.shape or WIDEST).depth)


KIND = ProposerKind(_make, needs=("head",), draws=True, about="the same head, drawing from its distribution: a chain")
