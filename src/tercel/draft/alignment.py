"""Which token, position and teacher belong to which row: the place where everybody has had a bug.

Row `t` holds the target's feature `f_t` (spec section 3, paper section 3.2). Training-time test feeds the row
`S` times; at step `s`

    token in      x[t+1+s]    (the data token: teacher forcing)
    RoPE position t + s
    predicts      x[t+2+s]
    teacher       the target's logits at position t+1+s

The head's entry for the token at position `p` therefore sits at head position `p - 1`: the committed token
`x[t+1]` (step 0) at `t`, a drafted one `d` levels below it (step `d`) at `t + d`. Training, the acceptance
simulation, decoding and the proof of an export all take these numbers from here. The functions take one index or a
tensor of them.

By hand, for tokens `a b C D E` with `C D E` the assistant's (`supervised = 0 0 1 1 1`), `S = 3`:

    row 0 (f_a): step 0 reads b, predicts C; step 1 reads C, predicts D; step 2 reads D, predicts E
    row 1 (f_b): step 0 reads C, predicts D; step 1 reads D, predicts E
    row 2 (f_C): step 0 reads D, predicts E
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from tercel.errors import TercelError

Index = TypeVar("Index", int, Tensor)


def token_in(row: Index, step: int) -> Index:
    """Index of the token that row `row` reads at `step`."""
    return row + 1 + step


def predicted(row: Index, step: int) -> Index:
    """Index of the token that row `row` predicts at `step`."""
    return row + 2 + step


def deciding(token: Index) -> Index:
    """Index of the target position whose logits decide what the token at index `token` is."""
    return token - 1


def imitated(row: Index, step: int) -> Index:
    """Index of the target position whose logits row `row` imitates at `step`."""
    return deciding(predicted(row, step))


def rope_position(row_position: Index, step: int) -> Index:
    """Position of the row's query and key at `step`, from the position of its feature."""
    return row_position + step


def head_position(token_position: Index) -> Index:
    """Position of the head's entry for the token at `token_position` (committed or drafted)."""
    return token_position - 1


FIRST_PREDICTED = predicted(0, 0)  # no row predicts an earlier token of a sequence


@dataclass(frozen=True)
class RowPlan:
    """Rows of training-time test over packed sequences of `N` tokens in all.

    rows: for each step, int64 `[R_s]`, the packed indices `t` that count there; `rows[s+1]` is a subset of
    `rows[s]`.
    subset: for each step, int64 `[R_s]`, where the rows stand in `rows[s-1]` (in `rows[0]` itself for step
    0).
    """

    rows: tuple[Tensor, ...]
    subset: tuple[Tensor, ...]


def supervised_runs(supervised: Tensor, lengths: list[int]) -> Tensor:
    """int64 `[N]`: how many supervised tokens in a row start at each index, within its sequence.

    `supervised` bool `[N]`: whether the token itself is produced by the assistant; `lengths` of the packed
    sequences, which sum to `N`.
    """
    index = torch.arange(len(supervised))
    ends = torch.cumsum(torch.tensor(lengths), 0)
    end_of_sequence = torch.repeat_interleave(ends, torch.tensor(lengths))
    # the first index at or after each one that is not supervised: a reversed running minimum
    barrier = torch.where(supervised, torch.tensor(len(supervised)), index)
    next_gap = barrier.flip(0).cummin(0).values.flip(0)
    return torch.minimum(next_gap, end_of_sequence) - index


def plan_rows(supervised: Tensor, lengths: list[int], steps: int) -> RowPlan:
    """A row counts at step `s` if the token it predicts there, and all since the first it predicts, are
    supervised and belong to its own sequence.

    Raises `TercelError` if the lengths do not sum to the number of tokens.
    """
    total = len(supervised)
    if sum(lengths) != total:
        raise TercelError(f"packed lengths sum to {sum(lengths)}, but there are {total} tokens")
    runs = supervised_runs(supervised, lengths)
    last = torch.repeat_interleave(torch.cumsum(torch.tensor(lengths), 0), torch.tensor(lengths))
    index = torch.arange(total)
    first_predicted = predicted(index, 0)
    inside = first_predicted < last
    run = torch.zeros(total, dtype=torch.long)
    run[inside] = runs[first_predicted[inside]]
    rows, subset = [], []
    previous = torch.nonzero(run > 0)[:, 0]
    for step in range(steps):
        keep = run[previous] > step
        subset.append(torch.nonzero(keep)[:, 0])
        previous = previous[keep]
        rows.append(previous)
    return RowPlan(tuple(rows), tuple(subset))
