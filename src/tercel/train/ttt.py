"""Training-time test: the head is fed its own outputs while it learns (paper section 3.2, spec sections 3-5).

Prompt tokens are context only: they give keys and values at step 0 and nothing else, so the later steps,
where nearly all the work is, run over supervised rows alone.

Shape legend: N packed tokens, R_s rows that count at step s, U supervised positions, H hidden size of the
head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from tercel.draft.alignment import RowPlan, plan_rows, rope_position, token_in
from tercel.draft.eagle3 import Eagle3Head
from tercel.draft.head import AttendingHead, LayerHead
from tercel.draft.layers import Projected
from tercel.train.attention import Segment, segments, ttt_attention
from tercel.train.config import Objective
from tercel.train.goals import Batch, Extent, RowGoals, TTTResult, loss_of_steps, row_goals, with_more
from tercel.train.losses import feature_distance


def training_time_test(
    head: Eagle3Head,
    batch: Batch,
    to_draft: Tensor,
    objective: Objective,
    *,
    whole: Extent | None = None,
    every_draft: bool = True,
    feature_weight: float = 0.0,
    read: Callable[[Tensor], Tensor] | None = None,
) -> TTTResult:
    """Run the head `S` steps over its own outputs and sum the losses.

    to_draft int64 `[V]`; whole: the extent of the optimizer step that the batch is a part of (None: of the batch
    itself), so that the losses of the parts sum to that of the whole; every_draft: False leaves out the drafts of all
    steps but the first; feature_weight: of how far what the head's output layer reads is from what the target's does,
    which is no part of EAGLE-3 (`batch.hidden` has to be there); read: as of `roll_out`.
    """
    plan = plan_rows(batch.supervised.cpu(), batch.lengths, objective.steps)
    said: list[Tensor] = []  # of each step, what the output layer reads
    wanted: list[RowGoals] = []
    for step, output in enumerate(roll_out(head, batch, plan, read=read)):
        said.append(head.norm(output))
        wanted.append(row_goals(batch, to_draft, objective, plan, step, whole))
    result = loss_of_steps(said, wanted, head.lm_head.weight, batch, objective, plan, every_draft=every_draft)
    if not feature_weight:
        return result
    assert batch.hidden is not None
    far = [
        feature_weight * feature_distance(hidden, batch.hidden[goal.taught]) * goal.weights
        for hidden, goal in zip(said, wanted, strict=True)
    ]
    return with_more(result, far)


def roll_out(
    head: AttendingHead,
    batch: Batch,
    plan: RowPlan,
    *,
    cut: bool = False,
    read: Callable[[Tensor], Tensor] | None = None,
) -> Iterator[Tensor]:
    """The head's outputs `[R_s, H]` over the rows of each of `plan`'s steps, as long as there are any.

    cut: a step's output is only a number to the next one, through which no gradient flows. read: what the next step
    reads in place of the text's tokens, embeddings `[R_s, Ht]` for outputs `[R_s, H]`.
    """
    embeddings = embedded(head, batch)

    def following(step: int, rows: Tensor, kept: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        tokens = embeddings[token_in(rows, step)] if read is None else read(before)[kept]
        return tokens, head.feedback(before.detach() if cut else before)[kept]

    return roll(head, batch, plan, embeddings, head.fuse(batch.features), following)


def embedded(head: LayerHead, batch: Batch) -> Tensor:
    """`[N, H]`, of the batch's tokens."""
    return head.embed_tokens(batch.tokens) if batch.embeddings is None else batch.embeddings


# What the rows `[R_s]` of a step after the first read, embeddings and hidden `[R_s, H]` each: of step, rows, where they
# stand among those of the step before, and what those gave.
Read = Callable[[int, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def roll(
    head: LayerHead, batch: Batch, plan: RowPlan, embeddings: Tensor, fused: Tensor, read: Read
) -> Iterator[Tensor]:
    """The outputs `[R_s, H]` of each of `plan`'s steps, as long as there are any: step 0 reads `embeddings` and `fused`
    features `[N, H]`, and in every layer a later row sees the keys of step 0 up to its own and its own of the steps
    since."""
    device, positions = batch.tokens.device, batch.positions
    if len(plan.rows[0]) == 0:
        return
    kept: list[_LayerKeys] = []  # of each layer

    # Step 0 over all tokens: the last of a sequence reads a token that is not its own, but no row sees it.
    every, rows = torch.arange(len(batch.tokens)), plan.rows[0]
    last = len(head.deeper)

    def begin(layer: int, now: Projected) -> tuple[Tensor, Tensor]:
        asked = rows if layer == last else every  # of whose outputs the next layer makes its keys
        here, pieces = asked.to(device), segments(asked, batch.lengths)
        kept.append(_LayerKeys(now, len(rows)))
        return now.residual[here], kept[layer].attended(now.query[here], here, pieces)

    following = token_in(every, 0).clamp(max=len(every) - 1).to(device)
    output = head.step(head.project(embeddings[following], fused, positions), positions, begin)
    yield output

    for step in range(1, len(plan.rows)):
        if len(plan.rows[step]) == 0:
            return
        here, keep = plan.rows[step].to(device), plan.subset[step].to(device)
        pieces, at = segments(plan.rows[step], batch.lengths), rope_position(positions[here], step)

        def go_on(layer: int, now: Projected) -> tuple[Tensor, Tensor]:
            kept[layer].add(now, keep)  # noqa: B023 (called before the next step)
            return now.residual, kept[layer].attended(now.query, here, pieces)  # noqa: B023

        output = head.step(head.project(*read(step, here, keep, output), at), at, go_on)
        yield output


class _LayerKeys:
    """Keys and values of a layer: of step 0 `[N, kv, D]`, and `[s, R_s, kv, D]` of the rows' own later steps."""

    def __init__(self, first: Projected, rows: int) -> None:
        self.key, self.value = first.key, first.value
        self.own_keys = self.own_values = first.key.new_empty(0, rows, *first.key.shape[1:])

    def add(self, now: Projected, keep: Tensor) -> None:
        """Those of a step, whose rows are `keep` of the one before."""
        self.own_keys = torch.cat([self.own_keys[:, keep], now.key[None]])
        self.own_values = torch.cat([self.own_values[:, keep], now.value[None]])

    def attended(self, query: Tensor, rows: Tensor, pieces: list[Segment]) -> Tensor:
        own_keys, own_values = self.own_keys, self.own_values
        if not len(own_keys):  # at step 0 more rows may ask than go on
            own_keys = own_values = own_keys.new_empty(0, len(rows), *own_keys.shape[2:])
        return ttt_attention(query, self.key, self.value, own_keys, own_values, rows, pieces)
