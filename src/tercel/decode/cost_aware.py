"""Any proposer, its drafts cut to what pays on this machine."""

from __future__ import annotations

from collections.abc import Sequence

from tercel.decode.clock import PhaseClock
from tercel.decode.costs import LiveCosts, StepCosts
from tercel.decode.draft_tree import DraftTree
from tercel.decode.outcomes import Outcomes
from tercel.decode.proposer import PassingOn, Proposer, Row
from tercel.decode.tree_policy import TreePolicy
from tercel.decode.types import Committed, Proposal


class CostAware(PassingOn):
    """Has the inner proposer draft where that pays, verifies of its drafts what pays, and learns from what comes of it:
    how likely drafts are accepted, and what steps cost by the loop's own clock.

    The text is the same as with no drafts at all: only their size hangs on times. With `steady` not even that: costs
    are then those of the table, to the end.
    """

    def __init__(
        self, inner: Proposer, costs: StepCosts, outcomes: Outcomes | None = None, *, steady: bool = False
    ) -> None:
        super().__init__(inner)
        self.outcomes = outcomes or Outcomes(None)
        self.policy = TreePolicy(LiveCosts(costs), self.outcomes.chances, inner.max_nodes)
        self._steady = steady
        self._clock: PhaseClock | None = None
        self._proposals: list[Proposal] = []  # of the step that is being verified, by row
        self._rows: list[int] = []  # where those rows stood in it
        self._target: float | None = None  # seconds of the target's phases until then
        inner.sized_by(self.policy)

    def timed_by(self, clock: PhaseClock) -> None:
        self._clock, self._target = None if self._steady else clock, None
        super().timed_by(clock)

    def propose(self, rows: Sequence[Row]) -> list[Proposal]:
        self._see_forward()
        policy = self.policy
        context = sum(len(row.tokens) for row in rows) // len(rows)
        if policy.begin([not row.params.greedy for row in rows], context):
            started = self._now()
            proposals = super().propose(rows)
            if self._clock is not None:
                spent = 1e3 * (self._now() - started) - policy.step.catching_up_ms
                policy.costs.saw_drafting(len(rows), policy.step.levels, spent)
            self._proposals = policy.step.choose(proposals)
        else:
            self._proposals = [Proposal(DraftTree.root_only(row.tokens[-1])) for row in rows]
        self._rows = list(range(len(rows)))
        self._target = self._spent()
        return list(self._proposals)

    def select_rows(self, rows: Sequence[int]) -> None:
        if self._rows:
            self._rows = [self._rows[row] for row in rows]
        if not rows:
            self.outcomes.keep()
        super().select_rows(rows)

    def commit(self, committed: Sequence[Committed]) -> None:
        self.policy.step.learn(self._rows, [self._proposals[row] for row in self._rows], committed)
        self._rows = []
        super().commit(committed)

    def _see_forward(self) -> None:
        if self._target is not None:
            step, seconds = self.policy.step, self._spent() - self._target
            if seconds > 0:
                self.policy.costs.saw_forward(step.rows, step.nodes, step.context, 1e3 * seconds)

    def _now(self) -> float:
        return 0.0 if self._clock is None else self._clock.now()

    def _spent(self) -> float:
        return 0.0 if self._clock is None else self._clock.seconds["target"] + self._clock.seconds["verify"]
