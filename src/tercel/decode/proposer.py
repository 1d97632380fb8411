"""What every method of speculative decoding is to the loop: something that proposes drafts (docs/proposers.md)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from tercel.decode.clock import PhaseClock
from tercel.decode.sampling import RandomStream, SamplingParams
from tercel.decode.types import Committed, Proposal
from tercel.decode.verify import LossyRule
from tercel.target_model.kept import KeptTokens
from tercel.target_model.memory import CacheMemory
from tercel.target_model.output import TargetOutput

if TYPE_CHECKING:
    from tercel.decode.tree_policy import TreePolicy
    from tercel.draft import DraftHead


class Row(Protocol):
    """What a proposer may know of a request: all its tokens so far, how it is sampled, its random numbers."""

    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def params(self) -> SamplingParams: ...
    @property
    def stream(self) -> RandomStream: ...


class Proposer(Protocol):
    """Proposes a draft for every row, from whatever state it keeps of the rows; it is told of all that happens to them.

    A subclass that keeps no state has a name, `max_nodes` and `propose`; what it inherits does nothing.

    name: what reports call it. feature_layers: which target layers it wants captured. max_nodes: the largest tree it
    proposes, root included, and what it has computed beside that. needs_tree: whether that is ever more than a chain.
    lossy: how its drafts are verified, if not as everywhere: by a rule that changes the text. head: the trained one
    that it drafts with, if it has one: how likely its drafts are is kept from run to run.
    """

    name: str
    feature_layers: tuple[int, ...] = ()
    max_nodes: int
    needs_tree: bool = False
    lossy: LossyRule | None = None
    head: DraftHead | None = None

    @property
    def memory(self) -> CacheMemory:
        """Of what it keeps for every token of its rows."""
        return CacheMemory(0, 0)

    @property
    def rerun(self) -> int | None:
        """A request that begins as an earlier one did goes on behind tokens that neither the target nor the proposer
        reads again. How many of them the target is to run all the same, because what is kept here of a token hangs on
        those after it; None: requests always have to be read from their first token, as whoever reads features has to
        unless it says otherwise."""
        return None if self.feature_layers else 0

    def timed_by(self, clock: PhaseClock) -> None:
        """A loop begins to use it, with this clock: whoever drafts with a model books its forwards as `head`."""
        return

    def sized_by(self, policy: TreePolicy) -> None:
        """Its drafts will be cut to what pays: whoever pays for every level of them may ask this before the next."""
        return

    def reset(self, capacity: int) -> None:
        """Forget all rows; sequences will have up to `capacity` tokens."""
        return

    def taken(self, row: int, start: int, end: int, last: Committed | None) -> KeptTokens | None:
        """What it keeps of a row's tokens from `start` until `end`, as far as it does, as it lies there: for requests
        that begin alike. None if it keeps nothing. It must hang on the tokens before `end` alone.

        last: what the row's last step made permanent, if it leaves with that.
        """
        return None

    def resume(self, kept: Sequence[Sequence[KeptTokens | None]]) -> None:
        """The requests that are admitted next begin with tokens of which it kept that, by request and one piece after
        the other."""
        return

    def admit(self, rows: Sequence[Row], prompts: Sequence[TargetOutput]) -> None:
        """Requests enter as the last rows: `prompts` are the target's outputs over their prompts (`[1, T, ..]` each),
        or over what was run of them, their last `T` tokens (`rerun`), and `tokens` of each row already ends with the
        token that the target chose after it."""
        return

    def propose(self, rows: Sequence[Row]) -> list[Proposal]:
        """A draft for every row; the root is its last token."""
        ...

    def commit(self, committed: Sequence[Committed]) -> None:
        """What the target made permanent, for every row."""
        return

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""
        return

    def notes(self) -> Sequence[str]:
        """Sentences for the user about the requests so far: what drafting could not do."""
        return ()


class PassingOn(Proposer):
    """Passes everything on to another proposer; a subclass looks on, or changes what is proposed."""

    def __init__(self, inner: Proposer) -> None:
        self.inner = inner
        self.name, self.feature_layers = inner.name, inner.feature_layers
        self.max_nodes, self.needs_tree = inner.max_nodes, inner.needs_tree
        self.lossy, self.head = inner.lossy, inner.head

    @property
    def memory(self) -> CacheMemory:
        return self.inner.memory

    @property
    def rerun(self) -> int | None:
        return self.inner.rerun

    def timed_by(self, clock: PhaseClock) -> None:
        self.inner.timed_by(clock)

    def sized_by(self, policy: TreePolicy) -> None:
        self.inner.sized_by(policy)

    def reset(self, capacity: int) -> None:
        self.inner.reset(capacity)

    def taken(self, row: int, start: int, end: int, last: Committed | None) -> KeptTokens | None:
        return self.inner.taken(row, start, end, last)

    def resume(self, kept: Sequence[Sequence[KeptTokens | None]]) -> None:
        self.inner.resume(kept)

    def admit(self, rows: Sequence[Row], prompts: Sequence[TargetOutput]) -> None:
        self.inner.admit(rows, prompts)

    def propose(self, rows: Sequence[Row]) -> list[Proposal]:
        return self.inner.propose(rows)

    def commit(self, committed: Sequence[Committed]) -> None:
        self.inner.commit(committed)

    def select_rows(self, rows: Sequence[int]) -> None:
        self.inner.select_rows(rows)

    def notes(self) -> Sequence[str]:
        return self.inner.notes()


def innermost(proposer: Proposer) -> Proposer:
    """The one that drafts, whoever passes its drafts on."""
    while isinstance(proposer, PassingOn):
        proposer = proposer.inner
    return proposer
