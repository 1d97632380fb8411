"""Small worlds for measuring: tiny targets, proposers with good drafts, and decoders with a planted fault."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from tercel.decode.draft_tree import DraftTree
from tercel.decode.engine import Engine
from tercel.decode.proposer import Proposer, Row
from tercel.decode.sampling import sample
from tercel.decode.types import Proposal
from tercel.decode.vanilla import Vanilla
from tercel.measure.tasks import Prompt
from tercel.target_model.model import Target
from tercel.target_model.sources import Source
from tests.tiny import tiny_model, tiny_tokenizer

V = 24  # few enough tokens that counts tell something
PROMPTS = (Prompt("world/a", (5, 9, 11, 7)), Prompt("world/b", (8, 8, 20, 6, 15, 4)))
SOURCE = Source("tiny", "tiny", "folder", None)


@cache
def small_target() -> Target:
    """24 tokens, no tokenizer."""
    return Target(tiny_model("llama", vocab_size=V, num_hidden_layers=3, initializer_range=0.3), None, SOURCE)


@cache
def chat_target() -> Target:
    """128 tokens with a tokenizer and a chat template."""
    return Target(tiny_model("llama", num_hidden_layers=3), tiny_tokenizer(), SOURCE)


class OfTarget(Proposer):
    """Drafts from what the target itself says."""

    def __init__(self, target: Target) -> None:
        self.target = target

    def next_logits(self, rows: Sequence[Sequence[int]]) -> Tensor:
        return self.target.logits(self.target.encode(torch.tensor(rows)).hidden[:, -1])


class OwnTree(OfTarget):
    """Three children of the root and two of each, by the target's own ranking: most paths are accepted."""

    name, max_nodes, needs_tree = "own-tree", 10, True

    def propose(self, rows: Sequence[Row]) -> list[Proposal]:
        return [Proposal(self._tree(list(row.tokens))) for row in rows]

    def _tree(self, tokens: list[int]) -> DraftTree:
        # the best last, so that an accepted path is no prefix of the block
        children = self.next_logits([tokens])[0].topk(3).indices.flip(0).tolist()
        below = self.next_logits([[*tokens, child] for child in children]).topk(2).indices.flip(1)
        nodes = [tokens[-1], *children, *below.flatten().tolist()]
        return DraftTree(torch.tensor(nodes), torch.tensor([-1, 0, 0, 0, 1, 1, 2, 2, 3, 3]))


class DrawnChain(OfTarget):
    """Two tokens drawn from a flattened, disturbed version of the target's distribution."""

    name, max_nodes, needs_tree = "drawn-chain", 3, False
    DEPTH = 2

    def propose(self, rows: Sequence[Row]) -> list[Proposal]:
        return [self._proposal(row) for row in rows]

    def _proposal(self, row: Row) -> Proposal:
        tokens, drawn_from = list(row.tokens), []
        stream = row.stream.for_drafts()
        for depth in range(self.DEPTH):
            disturbance = torch.sin(torch.arange(V) * (1.0 + tokens[-1]))
            q = torch.softmax((self.next_logits([tokens])[0] * 0.7 + 1.5 * disturbance).double(), -1)
            drawn_from.append(q)
            tokens.append(sample(q, stream.uniform(len(row.tokens), depth)))
        tree = DraftTree.chain(row.tokens[-1], tokens[-self.DEPTH :])
        return Proposal(tree, lambda node: drawn_from[node])


def vanilla(target: Target, slots: int = 1) -> Engine:
    return Engine(target, Vanilla(), slots=slots)
