"""The pieces of a decoding step, each to be run alone and to be timed: the target's forward by rows, width and context,
its output layer, and a head's levels. A piece leaves everything as it was.

Shapes, as suffixes of names: B rows, T width of a block, K nodes of a level, H head's hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tercel.decode.head_proposer import HeadProposer
from tercel.draft.alignment import token_in
from tercel.draft.shape import WIDEST
from tercel.target_model.output import TargetOutput
from tercel.target_model.prefill import Prompt, run_chunk
from tercel.target_model.protocol import RowCache, TargetModel

CHILDREN = WIDEST.top_k
COMMITTED = 2  # tokens that a step yields, about: what a head takes in at once
Piece = Callable[[], object]
OnTokens = Callable[[int], None]


class Context:
    """Rows of the target's cache that hold `length` tokens each. progress: prompt tokens run."""

    def __init__(
        self,
        target: TargetModel,
        length: int,
        room: int,
        progress: OnTokens = lambda tokens: None,
        capture: Sequence[int] = (),
        rows: int = 1,
    ) -> None:
        self.target, self.length = target, length
        self.tokens = _some_tokens(target, length + room)
        self.cache: RowCache = target.new_cache(rows, length + room)
        prompts = [Prompt(self.tokens[:length]) for _ in range(rows)]
        first = 0
        while first < rows:
            before = sum(len(prompt.remaining) for prompt in prompts)
            first += run_chunk(target, prompts[first:], self.cache, range(first, rows), capture=capture)
            progress(before - sum(len(prompt.remaining) for prompt in prompts))
        self.output: TargetOutput = prompts[0].output

    def forward(self, width: int, capture: Sequence[int]) -> Callable[[], TargetOutput]:
        """A block of `width` tokens behind every row, as trees are run; nothing of it is committed."""
        target, rows = self.target, len(self.cache.lengths)
        deepest = target.block_depth(self.length)
        tokens_1T = torch.tensor([self.tokens[self.length : self.length + width]], device=target.device)
        positions_1T = self.length + torch.arange(width, device=target.device).clamp(max=deepest)[None]
        tokens_BT, positions_BT = (block.repeat(rows, 1) for block in (tokens_1T, positions_1T))
        seen_BTT = torch.ones(rows, width, width, dtype=torch.bool, device=target.device).tril()
        return lambda: target.forward(tokens_BT, positions_BT, self.cache, seen_BTT, capture)


class HeadContext:
    """A proposer's side of the first row of `context`, which has the layers that it reads."""

    def __init__(self, proposer: HeadProposer, context: Context) -> None:
        self.head, self.context, length = proposer.head, context, context.length
        self.state = state = proposer.new_state()
        state.cache.add_rows(1)
        self._features = [layer[0] for layer in context.output.layers]
        self._entries = context.tokens[token_in(0, 0) : length + 1]
        with torch.no_grad():
            state.output = state.extend([self._features], [self._entries])
        self.held = state.cache.lengths[0]

    @torch.no_grad()
    def commit(self) -> None:
        """What a step's tokens leave in the head."""
        self.state.extend([[layer[:COMMITTED] for layer in self._features]], [self._entries[:COMMITTED]])
        self.state.cache.lengths[0] = self.held  # to be written over by the next run

    @torch.no_grad()
    def first_level(self) -> object:
        """But the output layer over what `commit` gave, and the choice of the likeliest."""
        return self.state.best(self.state.output, CHILDREN, 1)

    def level(self, nodes: int, depth: int) -> Piece:
        """The level below `depth`, of `nodes` nodes, each with one ancestor in every level above."""
        device = self.state.output.device
        tokens_1K = torch.tensor([[*self.context.tokens[:1]] * nodes], device=device)
        ancestors_1KD = torch.eye(nodes, dtype=torch.bool, device=device).repeat(1, depth)[None]

        @torch.no_grad()
        def below(output_1KH: Tensor, place: int) -> Tensor:
            fed_1KH = self.head.feedback(output_1KH)
            return self.state.draft_level(tokens_1K, fed_1KH, ancestors_1KD[..., : place * nodes], place)

        output_1KH = self.state.output[:, None].expand(-1, nodes, -1)
        for place in range(1, depth):
            output_1KH = below(output_1KH, place)

        @torch.no_grad()
        def run() -> object:
            return self.state.best(below(output_1KH, depth), CHILDREN, depth + 1)

        return run


def _some_tokens(target: TargetModel, count: int) -> list[int]:
    """Ordinary ones, all over the vocabulary: experts and embeddings are met as in real text, or more evenly."""
    first = min(100, target.vocab_size // 2)
    return [first + (index * 7919) % (target.vocab_size - first) for index in range(count)]
