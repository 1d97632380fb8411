"""No draft at all: token-by-token decoding through the same loop."""

from __future__ import annotations

from collections.abc import Sequence

from tercel.decode.draft_tree import DraftTree
from tercel.decode.proposer import Proposer, Row
from tercel.decode.proposers import VANILLA, ProposerKind
from tercel.decode.types import Proposal


class Vanilla(Proposer):
    """Proposes the root alone, so that a verification is one step of plain decoding."""

    name = VANILLA
    max_nodes = 1

    def propose(self, rows: Sequence[Row]) -> list[Proposal]:
        return [Proposal(DraftTree.root_only(row.tokens[-1])) for row in rows]


KIND = ProposerKind(lambda parts: Vanilla(), about="no drafts: token by token")
