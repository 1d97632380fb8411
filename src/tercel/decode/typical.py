"""Medusa's typical acceptance (arXiv 2401.10774, section 2.3.1): faster than verification, and lossy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tercel.decode.draft_tree import DraftTree
from tercel.decode.history import TokenHistory
from tercel.decode.sampling import RandomStream, SamplingParams, choose_token, target_distribution
from tercel.decode.verify import Verdict


class _Path(NamedTuple):
    """Accepted nodes, and the logarithm of the target's probability of their tokens."""

    likelihood: float
    nodes: tuple[int, ...]


@dataclass(frozen=True)
class Typical:
    """A draft is accepted where the target's probability of it is above `min(epsilon, delta * exp(-entropy))`, whatever
    the target would have drawn there: where it is sure nothing else passes, and where it is not, much does.

    Of all paths whose nodes are all accepted, the longest is taken, of several the target's likeliest. The token after
    it is the target's own, drawn as everywhere. At temperature 0 a probability is 0 or 1, so that nothing is lost
    there; above, tokens that the target finds likely come up too often.
    """

    epsilon: float = 0.09
    delta: float = 0.3
    title = "typical acceptance"

    def verify(
        self, tree: DraftTree, logits: Tensor, params: SamplingParams, history: TokenHistory, stream: RandomStream
    ) -> Verdict:
        """logits `[N, V]`, row `i` the target's after node `i`."""
        tokens = tree.token_list
        best = self._best(tree, 0, _Path(0.0, ()), logits, params, history)
        accepted = tuple(tokens[node] for node in best.nodes)
        try:
            for token in accepted:
                history.push(token)
            own = choose_token(logits[best.nodes[-1] if best.nodes else 0], params, history, stream)
        finally:
            history.pop(len(accepted))
        return Verdict(best.nodes, accepted, own)

    def _best(
        self,
        tree: DraftTree,
        node: int,
        so_far: _Path,
        logits: Tensor,
        params: SamplingParams,
        history: TokenHistory,
    ) -> _Path:
        """The best path that begins with `so_far`, whose tokens `history` ends with, and goes on below `node`."""
        children = tree.children(node)
        if not children:
            return so_far
        p = target_distribution(logits[node], params, history)
        least = min(self.epsilon, self.delta * math.exp(-float(torch.special.entr(p).sum())))
        best = so_far
        for child in children:
            token = tree.token_list[child]
            chance = float(p[token])
            if chance <= least:
                continue
            history.push(token)
            try:
                path = _Path(so_far.likelihood + math.log(chance), (*so_far.nodes, child))
                found = self._best(tree, child, path, logits, params, history)
            finally:
                history.pop(1)
            if (len(found.nodes), found.likelihood) > (len(best.nodes), best.likelihood):
                best = found
        return best
