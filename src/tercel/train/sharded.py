"""A target that is split over the ranks computes for all of them together.

With its layers sharded, every rank runs its own sequences, and in each forward all of them give their parts of the
weights: so all need as many forwards, and whoever has fewer sequences runs a token for nobody. With its matrices cut
(tensor parallelism) a forward is that of one batch which all have: so all run everybody's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tercel.target_model.backend_names import NONE, TENSOR
from tercel.target_model.output import TargetOutput
from tercel.target_model.protocol import TargetModel
from tercel.train.ranks import Ranks


def encode_all(
    target: TargetModel, ranks: Ranks, blocks: Sequence[Tensor], capture: Sequence[int]
) -> Iterator[TargetOutput]:
    """What the target gives for each of this rank's `blocks` (int64 `[B, T]`, on the CPU), in order.

    Where the target is split, all ranks call this together and take all it yields.
    """
    if target.sharding == NONE:
        for tokens in blocks:
            yield target.encode(tokens.to(target.device), capture)
        return
    everybodys = ranks.gather(list(blocks))
    nobodys = torch.zeros(1, 1, dtype=torch.long)
    turns = (
        [(tokens, rank == ranks.rank) for rank, theirs in enumerate(everybodys) for tokens in theirs]
        if target.sharding == TENSOR
        else [(blocks[i] if i < len(blocks) else nobodys, i < len(blocks)) for i in range(max(map(len, everybodys)))]
    )
    for tokens, is_mine in turns:
        with ranks.meeting():
            output = target.encode(tokens.to(target.device), capture)
        if is_mine:
            yield output
