"""Every row's tree before the target: one forward for all, and a verdict a row.

Shape legend: B rows, N nodes of the largest tree, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from tercel.decode.block import Block
from tercel.decode.clock import PhaseClock
from tercel.decode.proposer import Proposer
from tercel.decode.request import ActiveRequest
from tercel.decode.sampling import best_tokens, unchanged
from tercel.decode.types import Proposal
from tercel.decode.verify import LossyRule, Verdict, verify, verify_sampled_drafts
from tercel.target_model.output import TargetOutput
from tercel.target_model.protocol import RowCache, TargetModel


@dataclass(frozen=True)
class Judged:
    """block: what was run, and output what came of it. logits: `[B, N, V]` of the trees. verdicts: a row, or why it has
    none."""

    block: Block
    output: TargetOutput
    logits: Tensor
    verdicts: list[Verdict | Exception]


def judge(
    target: TargetModel,
    proposer: Proposer,
    cache: RowCache,
    rows: Sequence[ActiveRequest],
    proposals: Sequence[Proposal],
    clock: PhaseClock,
) -> Judged:
    """All trees run and verified. A row that fails is run again without its drafts, so that its answer ends where it
    would token by token: the NaN of a wrong draft reaches all nodes, whatever the mask.

    Drafts that were drawn stay: to draw anew only where they failed would change the text's distribution.
    """
    block = Block(proposals)
    while True:
        with clock.phase("target"):
            tokens, positions, seen = block.on(target.device, cache.lengths)
            output = target.forward(tokens, positions, cache, seen, proposer.feature_layers, range(len(tokens)))
            logits = target.logits(output.hidden[:, : block.nodes])  # [B, N, V]
        with clock.phase("verify"):
            verdicts = _verdicts(rows, block.proposals, logits, proposer.lossy)
        alone = [
            p.up_to(0) if isinstance(verdict, Exception) and p.distributions is None else p
            for p, verdict in zip(block.proposals, verdicts, strict=True)
        ]
        if alone == block.proposals:
            return Judged(block, output, logits, verdicts)
        block = block.of(alone)


def _verdicts(
    rows: Sequence[ActiveRequest], proposals: Sequence[Proposal], logits: Tensor, lossy: LossyRule | None
) -> list[Verdict | Exception]:
    """A verdict a row, or why it has none; for greedy requests all that leaves the device is the best token of every
    node."""
    plain = [row.params.greedy and unchanged(row.params, row.history) for row in rows]
    best = best_tokens(logits) if any(plain) else [[]] * len(plain)
    verdicts: list[Verdict | Exception] = []
    for row, proposal, scores, known, use in zip(rows, proposals, logits, best, plain, strict=True):
        tree, scores = proposal.tree, scores[: len(proposal.tree)]
        how = (row.params, row.history, row.stream)
        try:
            if lossy is not None:
                verdicts.append(lossy.verify(tree, scores, *how))
            elif proposal.distributions is None:
                verdicts.append(verify(tree, scores, *how, known if use else None))
            else:
                verdicts.append(verify_sampled_drafts(tree, scores, proposal.distributions, *how))
        except Exception as error:  # of a processor, whoever wrote it
            verdicts.append(error)
    return verdicts
