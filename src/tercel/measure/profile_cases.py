"""The pieces of a decoding step that a profile times, with the least that each has to do.

Shapes, as suffixes of names: T width of a block, K hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from tercel.decode.head_proposer import HeadProposer
from tercel.decode.pieces import COMMITTED, Context, HeadContext
from tercel.measure.machine import Work
from tercel.target_model.protocol import TargetModel


@dataclass(frozen=True)
class Case:
    """A piece, and what it has to do at least."""

    run: Callable[[], object]
    work: Work


def forward_case(context: Context, width: int, capture: Sequence[int]) -> Case:
    """A block of `width` tokens behind the context."""
    work, length = context.target.work, context.length
    least = Work(work.forward_bytes(length), 2 * work.forward_macs(width, length))
    return Case(context.forward(width, capture), least)


def output_case(target: TargetModel, width: int) -> Case:
    """The output layer over a block."""
    hidden_1TK = torch.ones(1, width, target.hidden_size, dtype=target.dtype, device=target.device)
    work = target.work
    return Case(lambda: target.logits(hidden_1TK), Work(work.output, 2 * width * work.output_macs))


def head_cases(proposer: HeadProposer, context: Context) -> Iterator[tuple[str, Case]]:
    """By name: `commit`, what a step's tokens leave in the head; then the levels of a tree or chain, of which the first
    is but the output layer over what `commit` gave; each with the choice of its likeliest drafts.

    context: with the layers that the head reads.
    """
    head, nodes, depth = proposer.head, proposer.shape.top_k, proposer.shape.depth
    config, size = head.config, torch.empty(0, dtype=head.dtype).element_size()
    cost, output = head.work(), config.hidden_size * config.draft_vocab_size
    pieces = HeadContext(proposer, context)
    seen = pieces.held * cost.kv * size
    committed = Work((cost.fuse + cost.drafted - output) * size, 2 * (COMMITTED * cost.fuse + cost.drafted - output))
    yield "commit", Case(pieces.commit, committed)
    yield "1", Case(pieces.first_level, Work(output * size, 2 * output))
    for level in range(1, depth):
        work = Work(cost.drafted * size + seen, 2 * nodes * (cost.drafted + cost.context * pieces.held))
        yield str(level + 1), Case(pieces.level(nodes, level), work)
