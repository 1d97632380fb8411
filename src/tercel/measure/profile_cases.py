"""The pieces of a decoding step, each to be run alone: the target's forward by width and context, its output layer, and
a head's levels.

Shapes, as suffixes of names: T width of a block, K nodes of a level, H head's hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tercel.decode.head_proposer import HeadProposer
from tercel.decode.head_state import HeadState
from tercel.draft.alignment import token_in
from tercel.measure.machine import Work
from tercel.target_model.output import TargetOutput
from tercel.target_model.prefill import Prompt, run_chunk
from tercel.target_model.protocol import RowCache, TargetModel

COMMITTED = 2  # tokens that a step yields, about: what a head takes in at once
OnTokens = Callable[[int], None]


@dataclass(frozen=True)
class Case:
    """A piece that leaves everything as it was, and what it has to do at least."""

    run: Callable[[], object]
    work: Work


class Context:
    """A row of the target's cache that holds `length` tokens. progress: prompt tokens run."""

    def __init__(
        self, target: TargetModel, length: int, room: int, progress: OnTokens, capture: Sequence[int] = ()
    ) -> None:
        self.target, self.length = target, length
        self.tokens = _some_tokens(target, length + room)
        self.cache: RowCache = target.new_cache(1, length + room)
        prompt = Prompt(self.tokens[:length])
        while prompt.remaining:
            before = len(prompt.remaining)
            run_chunk(target, [prompt], self.cache, [0], capture=capture)
            progress(before - len(prompt.remaining))
        self.output: TargetOutput = prompt.output

    def forward(self, width: int, capture: Sequence[int]) -> Case:
        """A block of `width` tokens behind it, as a tree is run; nothing of it is committed."""
        target = self.target
        deepest = target.block_depth(self.length)
        tokens_1T = torch.tensor([self.tokens[self.length : self.length + width]], device=target.device)
        positions_1T = self.length + torch.arange(width, device=target.device).clamp(max=deepest)[None]
        seen_1TT = torch.ones(1, width, width, dtype=torch.bool, device=target.device).tril()
        work = target.work
        return Case(
            lambda: target.forward(tokens_1T, positions_1T, self.cache, seen_1TT, capture),
            Work(work.forward_bytes(self.length), 2 * work.forward_macs(width, self.length)),
        )


def output_case(target: TargetModel, width: int) -> Case:
    """The output layer over a block."""
    hidden_1TK = torch.ones(1, width, target.hidden_size, dtype=target.dtype, device=target.device)
    work = target.work
    return Case(lambda: target.logits(hidden_1TK), Work(work.output, 2 * width * work.output_macs))


def head_cases(proposer: HeadProposer, context: Context) -> Iterator[tuple[str, Case]]:
    """By name: `commit`, what a step's tokens leave in the head; then the levels of a tree or chain, of which the first
    is but the output layer over what `commit` gave. What is made of their numbers is not the head's.

    context: with the layers that the head reads.
    """
    head, length = proposer.head, context.length
    config, size = head.config, torch.empty(0, dtype=head.dtype).element_size()
    cost, output = head.work(), config.hidden_size * config.draft_vocab_size
    nodes = proposer.shape.top_k
    state = proposer.new_state(length + COMMITTED + nodes * proposer.shape.depth)
    state.cache.add_rows(1)
    features, entries = [layer[0] for layer in context.output.layers], context.tokens[token_in(0, 0) : length + 1]
    state.output = state.extend([features], [entries])
    held = state.cache.lengths[0]
    seen = held * cost.kv * size

    def commit() -> None:
        state.extend([[layer[:COMMITTED] for layer in features]], [entries[:COMMITTED]])
        state.cache.lengths[0] = held  # to be written over by the next run

    committed = Work((cost.fuse + cost.drafted - output) * size, 2 * (COMMITTED * cost.fuse + cost.drafted - output))
    yield "commit", Case(torch.no_grad()(commit), committed)
    yield "1", Case(torch.no_grad()(lambda: state.log_q(state.output)), Work(output * size, 2 * output))
    for depth in range(1, proposer.shape.depth):
        work = Work(cost.drafted * size + seen, 2 * nodes * (cost.drafted + cost.context * held))
        yield str(depth + 1), Case(_level(state, context.tokens[:1], nodes, depth), work)


def _level(state: HeadState, tokens: Sequence[int], nodes: int, depth: int) -> Callable[[], Tensor]:
    """A level of `nodes` nodes, each with one ancestor in every level above."""
    device = state.output.device
    tokens_1K = torch.tensor([[*tokens] * nodes], device=device)
    ancestors_1KD = torch.eye(nodes, dtype=torch.bool, device=device).repeat(1, depth)[None]

    @torch.no_grad()
    def run() -> Tensor:
        fed_1KH = state.head.feedback(state.output)[:, None].expand(-1, nodes, -1)
        return state.log_q(state.draft_level(tokens_1K, fed_1KH, ancestors_1KD, depth))

    return run


def _some_tokens(target: TargetModel, count: int) -> list[int]:
    """Ordinary ones, all over the vocabulary: experts and embeddings are met as in real text, or more evenly."""
    first = min(100, target.vocab_size // 2)
    return [first + (index * 7919) % (target.vocab_size - first) for index in range(count)]
