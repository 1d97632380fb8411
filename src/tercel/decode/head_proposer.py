"""What all proposers share that draft with a head step by step: its state, row by row, and how far it may go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from tercel.decode.clock import PhaseClock
from tercel.decode.head_state import HeadState, HeadWindow, TorchHeadState
from tercel.decode.proposer import Proposer, Row
from tercel.decode.tree_policy import TreePolicy
from tercel.decode.types import Committed
from tercel.draft import AttendingHead, DraftModel, LayerHead, StepHead
from tercel.draft.alignment import head_position, token_in
from tercel.draft.shape import PAPER, TreeShape
from tercel.errors import TercelError
from tercel.target_model.backend_names import OPENVINO
from tercel.target_model.kept import KeptTokens
from tercel.target_model.memory import CacheMemory
from tercel.target_model.output import TargetOutput
from tercel.target_model.prefill import CHUNK
from tercel.target_model.protocol import TargetModel

if TYPE_CHECKING:
    from tercel.draft.graph import HeadGraphs

FEATURES = "features"  # the form of what is kept of tokens that the head has not taken in
WAITING = 32_768  # tokens of all rows at most whose features are held for a head that is not asked


class HeadProposer(Proposer):
    """Keeps the head's entries those of the committed tokens; how drafts are made of it, `propose`, is a subclass's."""

    def __init__(
        self,
        draft: DraftModel,
        target: TargetModel,
        shape: TreeShape | None = None,
        window: HeadWindow | None = None,
    ) -> None:
        self.draft, self.target = draft, target
        self.head: StepHead = draft.head_as(StepHead)  # type: ignore[type-abstract]
        self.shape = shape or PAPER
        self.feature_layers = draft.head.config.feature_layers
        self.max_nodes = self.shape.nodes
        self.needs_tree = self.shape.top_k > 1
        self.widest = max(self.shape.top_k, self.shape.nodes // 4 if self.needs_tree else 1)  # most nodes of a level
        self.positions = draft.head.config.max_position_embeddings
        self.limited = False  # whether drafting ever stopped for want of positions
        self.ids = draft.vocabulary.ids.to(target.device)
        self.window = window
        self._graphs = head_graphs(self.head, target)
        self.state = self.new_state()
        self.clock = PhaseClock(target.device)  # until a loop brings its own
        self.policy: TreePolicy | None = None
        self._behind: list[list[Committed]] = []  # what the head has not taken in yet, by row
        self._held = 0  # tokens of all that
        self._resumed: Sequence[Sequence[KeptTokens | None]] = ()  # what those have who come next

    @property
    def memory(self) -> CacheMemory:
        return self.state.cache.memory

    @property
    def rerun(self) -> int | None:
        """A token's entry has the feature of the one before, and so the last of a prefix has none yet for the next."""
        return 1 if self.state.resumes and self.window is None else None

    def timed_by(self, clock: PhaseClock) -> None:
        self.clock = clock

    def sized_by(self, policy: TreePolicy) -> None:
        self.policy = policy

    def reset(self, capacity: int) -> None:
        self.state = self.new_state()
        self._behind, self._held, self._resumed = [], 0, ()

    def new_state(self) -> HeadState:
        """An empty one, computed by what computes the target."""
        head = self.draft.head_as(AttendingHead)  # type: ignore[type-abstract]
        if self._graphs is None:
            return TorchHeadState(head, self.target, self.window)
        from tercel.decode.graph_head_state import GraphHeadState

        return GraphHeadState(head, self.target, self._graphs, self.window)

    @torch.no_grad()
    def admit(self, rows: Sequence[Row], prompts: Sequence[TargetOutput]) -> None:
        """Prompts are taken in at once, unless drafting does not pay: then many rows end before one is drafted for."""
        first = len(self._behind)
        self.state.cache.add_rows(len(rows))
        self._behind += [[] for _ in rows]
        self._go_on(rows)
        for number, (row, prompt) in enumerate(zip(rows, prompts, strict=True), first):
            tokens = row.tokens[len(row.tokens) - prompt.hidden.shape[1] :]  # each entry reads the token after its own
            self._wait(number, Committed(tuple(tokens), tuple(layer[0] for layer in prompt.layers)))
        if self.policy is None or not self.policy.idle(len(self._behind)):
            self._take_in(range(len(self._behind) - len(rows), len(self._behind)))
        self._hold_no_more()

    def commit(self, committed: Sequence[Committed]) -> None:
        for row, one in enumerate(committed):
            self._wait(row, one)
        self._hold_no_more()

    def resume(self, kept: Sequence[Sequence[KeptTokens | None]]) -> None:
        self._resumed = kept

    def _go_on(self, rows: Sequence[Row]) -> None:
        """Let the last rows, which are new, begin with what was kept: entries, or features that wait further."""
        first = len(self._behind) - len(rows)
        pieces = {
            number: _placed(row.tokens, kept)
            for number, (row, kept) in enumerate(zip(rows, self._resumed, strict=bool(self._resumed)), first)
        }
        self._resumed = ()
        taken_in = {row: _entries_first(own) for row, own in pieces.items()}
        self.state.cache.restore({row: own for row, own in taken_in.items() if own})
        for row, own in pieces.items():
            for piece in own[len(taken_in[row]) :]:
                if isinstance(piece, Committed):
                    self._wait(row, piece)
                else:
                    self._take_in([row] if self._behind[row] else [])
                    self.state.cache.restore({row: [piece]})

    @torch.no_grad()
    def taken(self, row: int, start: int, end: int, last: Committed | None) -> KeptTokens | None:
        """The entries that read these tokens, or where the head has taken in none of them, their features. The first
        token of all, which none reads, has a place too."""
        if last is not None:
            self._wait(row, last)
        known, behind = self.state.cache.lengths[row], self._behind[row]
        first, stop = max(0, head_position(start)), head_position(end)
        if behind and known <= first:
            layers = (torch.cat(layer) for layer in zip(*(part.layers for part in behind), strict=True))
            kept = KeptTokens(tuple(layers), FEATURES).part(first - known, stop - known)
        else:
            if known < stop:
                self._take_in([row])
            kept = self.state.cache.taken(row, first, stop)
        return kept if start else kept.with_first()

    def _wait(self, row: int, one: Committed) -> None:
        self._behind[row].append(one)
        self._held += len(one.tokens)

    def _hold_no_more(self) -> None:
        if self._held > WAITING:
            self.catch_up()

    def catch_up(self) -> None:
        """Take in what was committed: before a draft, since between two there may be many steps without one."""
        waiting = self._waiting()
        late = [row for row, count in enumerate(waiting) if count > self.shape.depth + 1]
        if late:
            started = self.clock.now()
            self._take_in(sorted(late, key=lambda row: waiting[row]))  # like lengths run together
            if self.policy is not None:
                self.policy.step.catching_up_ms += 1e3 * (self.clock.now() - started)
        self._take_in([row for row, count in enumerate(waiting) if 0 < count <= self.shape.depth + 1])

    def _waiting(self) -> list[int]:
        """Tokens of each row that the head has not taken in."""
        return [sum(len(part.tokens) for part in behind) for behind in self._behind]

    def _take_in(self, rows: Sequence[int]) -> None:
        """What was committed of `rows`."""
        if not rows:
            return
        parts = [self._behind[row] for row in rows]
        layers = [[torch.cat(layer) for layer in zip(*(c.layers for c in part), strict=True)] for part in parts]
        tokens = [[token for c in part for token in c.tokens] for part in parts]
        at_once = len(rows) * max(map(len, tokens)) <= CHUNK
        with self.clock.phase("head"):
            output = (self.state.extend if at_once else self.state.fill)(layers, tokens, rows)
            self.state.put(rows, output)
        for row in rows:
            self._behind[row] = []
        self._held -= sum(map(len, tokens))

    def select_rows(self, rows: Sequence[int]) -> None:
        self._behind = [self._behind[row] for row in rows]
        self._held = sum(self._waiting())
        self.state.select_rows(rows)

    def notes(self) -> Sequence[str]:
        if not self.limited:
            return ()
        return (f"the draft head has {self.positions:,} positions; the text beyond them has no drafts",)

    def depths(self, rows: Sequence[Row]) -> list[int]:
        """How deep each row's draft may go: every level hangs on entries one position further on, the first on the
        root's, and past its last position the head drafts nothing."""
        roots = [head_position(len(row.tokens) - 1) for row in rows]
        depths = [max(0, min(self.shape.depth, self.positions - root)) for root in roots]
        self.limited = self.limited or min(depths) < self.shape.depth
        return depths


def _placed(tokens: Sequence[int], kept: Sequence[KeptTokens | None]) -> list[KeptTokens | Committed]:
    """What was kept of a text's first tokens, without the place of the very first, as entries or as what makes them."""
    placed: list[KeptTokens | Committed] = []
    start = 0
    for piece in kept:
        assert piece is not None  # a head keeps something of every token
        end, read = start + len(piece), max(start, token_in(0, 0))
        own = piece.part(read - start, len(piece))
        if len(own):
            placed.append(Committed(tuple(tokens[read:end]), own.tensors) if piece.form == FEATURES else own)
        start = end
    return placed


def _entries_first(pieces: Sequence[KeptTokens | Committed]) -> list[KeptTokens]:
    """Those before the first features."""
    entries = list[KeptTokens]()
    for piece in pieces:
        if isinstance(piece, Committed):
            break
        entries.append(piece)
    return entries


def head_graphs(head: StepHead, target: TargetModel) -> HeadGraphs | None:
    """The head as graphs of the library that computes the target; None where that is torch, or cannot follow it."""
    if target.backend != OPENVINO or head.dtype != target.dtype or not isinstance(head, LayerHead):
        return None
    from tercel.draft.graph import HeadGraphs

    try:
        return HeadGraphs(head)
    except TercelError:
        return None
