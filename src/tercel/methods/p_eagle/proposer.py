"""P-EAGLE drafts: EAGLE-3's tree, whose levels below the first ask the head for next to nothing."""

from __future__ import annotations

from dataclasses import replace

from tercel.decode.eagle3 import Eagle3
from tercel.decode.head_proposer import HeadWindow
from tercel.decode.head_state import HeadState
from tercel.decode.proposers import P_EAGLE, Parts, ProposerKind
from tercel.draft import DraftModel
from tercel.draft.shape import WIDEST, TreeShape
from tercel.methods.p_eagle.module import PEagleHead
from tercel.methods.p_eagle.state import AheadState, GraphAheadState, TorchAheadState
from tercel.target_model.protocol import TargetModel


class PEagle(Eagle3):
    """The same growth, by the chances of whole paths; no tree is deeper than the head has positions."""

    name = P_EAGLE

    def __init__(
        self, draft: DraftModel, target: TargetModel, shape: TreeShape, window: HeadWindow | None = None
    ) -> None:
        positions = draft.head_as(PEagleHead).config.num_parts
        super().__init__(draft, target, replace(shape, depth=min(shape.depth, positions)), window)

    def new_state(self) -> HeadState:
        head = self.draft.head_as(PEagleHead)
        if self._graphs is None:
            state: AheadState = TorchAheadState(head, self.target, self.window)
        else:
            state = GraphAheadState(head, self.target, self._graphs, self.window)
        state.positions_ahead = self.shape.depth
        return state


def _make(parts: Parts) -> PEagle:
    assert parts.head is not None
    return PEagle(parts.head, parts.target, parts.shape or WIDEST.beside(parts.target.tree_support.tree))


KIND = ProposerKind(
    _make, needs=("head",), about="a head that drafts all positions in one forward (P-EAGLE, arXiv 2602.01469)"
)
