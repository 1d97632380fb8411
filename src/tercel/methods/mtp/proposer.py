"""MTP drafts: a tree or a chain that grows level by level as EAGLE's does, from the target's own MTP modules or from a
head of this kind that was trained."""

from __future__ import annotations

from collections.abc import Sequence

from tercel.decode.eagle3 import Eagle3
from tercel.decode.head_state import HeadState
from tercel.decode.proposers import MTP, Parts, ProposerKind
from tercel.draft.binding import bind
from tercel.draft.shape import WIDEST
from tercel.methods.mtp.module import MtpHead
from tercel.methods.mtp.read import FORMAT, read_mtp
from tercel.methods.mtp.state import MtpState


class Mtp(Eagle3):
    """The same growth; what an output is, and how entries are written, is the state's matter."""

    name = MTP

    def new_state(self) -> HeadState:
        return MtpState(self.draft.head_as(MtpHead), self.target, self.window)

    def notes(self) -> Sequence[str]:
        return (*super().notes(), *(self.draft.warnings if self.draft.format == FORMAT else ()))


def _make(parts: Parts) -> Mtp:
    """With the head, if that is one of MTP; else with what the target's own checkpoint holds."""
    head = parts.head
    if head is None or not isinstance(head.head, MtpHead):
        head = bind(read_mtp(parts.target), parts.target)
    return Mtp(head, parts.target, parts.shape or WIDEST.beside(parts.target.tree_support.tree))


KIND = ProposerKind(_make, may=("head",), about="MTP modules: the target's own, or a HEAD of them (arXiv 2412.19437)")
