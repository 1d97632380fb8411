"""What was drafted at every token of an answer, for a test that looks where a faulty rule does its harm."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tercel.decode.proposer import PassingOn, Proposer, Row
from tercel.decode.types import Proposal

KEPT = 64  # most probable tokens kept of a distribution drafts were drawn from: all would fill memory


@dataclass(frozen=True, eq=False)
class Drafted:
    """The draft's opinion on one token: `tokens` int `[F]`, and for sampled drafts `probs` float64 `[F]` of
    them.

    None of it depends on the token that was then chosen, nor on which tokens were drawn for it.
    """

    tokens: NDArray[np.int64]
    probs: NDArray[np.float64] | None = None

    def favoured(self, exact: NDArray[np.float64]) -> NDArray[np.int64]:
        """The tokens that a rule which trusts the draft too much would choose too often: all drafted ones, or
        those that the draft finds likelier than the target does (`exact` `[V]`)."""
        return self.tokens if self.probs is None else self.tokens[self.probs > exact[self.tokens]]


class DraftRecorder(PassingOn):
    """A proposer that passes on everything and writes down what it proposed, by the seed of the request."""

    def __init__(self, proposer: Proposer) -> None:
        super().__init__(proposer)
        self._proposed: dict[int, list[tuple[int, _Tree]]] = defaultdict(list)  # tokens so far, tree

    def propose(self, rows: Sequence[Row]) -> list[Proposal]:
        proposals = super().propose(rows)
        for row, proposal in zip(rows, proposals, strict=True):
            self._proposed[row.stream.seed].append((len(row.tokens), _Tree(proposal)))
        return proposals

    def take(self, seed: int, prompt_tokens: int, answer: Sequence[int]) -> dict[int, Drafted]:
        """By index in the answer of the request with `seed`: what was drafted there. Forgets that request."""
        drafted: dict[int, Drafted] = {}
        for total, tree in self._proposed.pop(seed, []):
            start = total - prompt_tokens
            drafted.update({start + depth: opinion for depth, opinion in enumerate(tree.along(answer[start:]))})
        return drafted


class _Tree:
    """A proposal, without its large tensors."""

    def __init__(self, proposal: Proposal) -> None:
        self._tree = proposal.tree
        self._drafted = {
            node: _opinion(proposal, node) for node in range(len(proposal.tree)) if proposal.tree.children(node)
        }

    def along(self, tokens: Sequence[int]) -> list[Drafted]:
        """Opinions on `tokens[0]`, `tokens[1]`, … as far as the tree holds the way there."""
        opinions: list[Drafted] = []
        node: int | None = 0
        for token in tokens:
            if node is None or node not in self._drafted:
                break
            opinions.append(self._drafted[node])
            node = self._tree.child(node, token)
        return opinions


def _opinion(proposal: Proposal, node: int) -> Drafted:
    if proposal.distributions is None:
        tokens = {proposal.tree.token_list[child] for child in proposal.tree.children(node)}
        return Drafted(np.array(sorted(tokens)))
    probs: Tensor = proposal.distributions(node).double()
    best = torch.topk(probs / probs.sum(), min(KEPT, len(probs)))
    return Drafted(best.indices.cpu().numpy(), best.values.cpu().numpy())
