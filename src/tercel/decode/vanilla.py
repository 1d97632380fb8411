"""No draft at all: token-by-token decoding through the same loop."""

from __future__ import annotations

from collections.abc import Sequence

from tercel.decode.draft_tree import DraftTree
from tercel.decode.proposer import Row
from tercel.decode.types import Committed, Proposal
from tercel.target_model.model import TargetOutput


class Vanilla:
    """Proposes the root alone, so that a verification is one step of plain decoding."""

    name = "vanilla"
    feature_layers: tuple[int, ...] = ()
    max_nodes = 1
    needs_tree = False

    def reset(self, capacity: int) -> None:
        pass

    def admit(self, row: Row, prompt: TargetOutput) -> None:
        pass

    def propose(self, rows: Sequence[Row]) -> list[Proposal]:
        return [Proposal(DraftTree.root_only(row.tokens[-1])) for row in rows]

    def commit(self, committed: Sequence[Committed]) -> None:
        pass

    def select_rows(self, rows: Sequence[int]) -> None:
        pass
