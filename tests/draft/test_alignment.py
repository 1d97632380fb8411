"""The alignment by hand, and against a definition that goes row by row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tercel.draft.alignment import (
    FIRST_PREDICTED,
    deciding,
    head_position,
    imitated,
    plan_rows,
    predicted,
    rope_position,
    supervised_runs,
    token_in,
)
from tercel.errors import TercelError

TEXT = "abCDE"


def test_the_example_of_the_module_by_hand():
    plan = plan_rows(torch.tensor([0, 0, 1, 1, 1], dtype=torch.bool), [5], 3)
    said = [
        (TEXT[row], step, TEXT[int(token_in(row, step))], TEXT[int(predicted(row, step))])
        for step, rows in enumerate(plan.rows)
        for row in rows
    ]
    assert said == [
        ("a", 0, "b", "C"),
        ("b", 0, "C", "D"),
        ("C", 0, "D", "E"),
        ("a", 1, "C", "D"),
        ("b", 1, "D", "E"),
        ("a", 2, "D", "E"),
    ]
    assert [s.tolist() for s in plan.subset] == [[0, 1, 2], [0, 1], [0]]


def test_numbers_of_a_row():
    row = torch.tensor([7])
    for step in range(4):
        assert token_in(row, step).item() == 8 + step
        assert predicted(row, step).item() == 9 + step
        assert imitated(row, step).item() == 8 + step  # the logits that predict the token predicted
        assert deciding(predicted(row, step)).item() == 8 + step
        assert rope_position(row, step).item() == 7 + step
        # decoding gives the entry that reads a token the position before that token's own
        assert head_position(token_in(row, step)).item() == rope_position(row, step).item()
    assert FIRST_PREDICTED == 2


PACKED = st.lists(st.lists(st.booleans(), min_size=1, max_size=9), min_size=1, max_size=4)


@settings(max_examples=150, deadline=None)
@given(sequences=PACKED, steps=st.integers(1, 5))
def test_plan_against_brute_force(sequences, steps):
    supervised = torch.tensor([flag for sequence in sequences for flag in sequence])
    lengths = [len(sequence) for sequence in sequences]
    plan = plan_rows(supervised, lengths, steps)
    previous: list[int] | None = None
    for step in range(steps):
        wanted, offset = [], 0
        for sequence in sequences:
            wanted += [
                offset + t
                for t in range(len(sequence))
                if t + 2 + step < len(sequence) and all(sequence[t + 2 + j] for j in range(step + 1))
            ]
            offset += len(sequence)
        rows = plan.rows[step].tolist()
        assert rows == wanted
        origin = wanted if previous is None else previous
        assert [origin[i] for i in plan.subset[step].tolist()] == rows
        previous = wanted


@settings(max_examples=80, deadline=None)
@given(sequences=PACKED)
def test_runs_end_at_gaps_and_at_the_sequences_end(sequences):
    supervised = torch.tensor([flag for sequence in sequences for flag in sequence])
    runs = supervised_runs(supervised, [len(sequence) for sequence in sequences]).tolist()
    wanted = []
    for sequence in sequences:
        for t in range(len(sequence)):
            tail = sequence[t:]
            wanted.append(tail.index(False) if False in tail else len(tail))
    assert runs == wanted


def test_lengths_that_do_not_fit_are_refused():
    with pytest.raises(TercelError, match="packed lengths sum to 4, but there are 5 tokens"):
        plan_rows(torch.ones(5, dtype=torch.bool), [1, 3], 2)
