"""What every method of speculative decoding is to the loop: something that proposes drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tercel.decode.sampling import RandomStream, SamplingParams
from tercel.decode.types import Committed, Proposal
from tercel.target_model.model import TargetOutput


class Row(Protocol):
    """What a proposer may know of a request: all its tokens so far, how it is sampled, its random numbers."""

    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def params(self) -> SamplingParams: ...
    @property
    def stream(self) -> RandomStream: ...


class Proposer(Protocol):
    """Keeps whatever state it drafts from, row by row, and is told of everything that happens to the rows.

    feature_layers: which target layers it wants captured. max_nodes: the largest tree it proposes, root included.
    needs_tree: whether that is ever more than a chain.
    """

    name: str
    feature_layers: tuple[int, ...]
    max_nodes: int
    needs_tree: bool

    def reset(self, capacity: int) -> None:
        """Forget all rows; sequences will have up to `capacity` tokens."""
        ...

    def admit(self, row: Row, prompt: TargetOutput) -> None:
        """A request enters as the last row: `prompt` is the target's output over its prompt (`[1, T, ..]`), and
        `row.tokens` already ends with the token that the target chose after it."""
        ...

    def propose(self, rows: Sequence[Row]) -> list[Proposal]:
        """A draft for every row; the root is its last token."""
        ...

    def commit(self, committed: Sequence[Committed]) -> None:
        """What the target made permanent, for every row."""
        ...

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""
        ...
