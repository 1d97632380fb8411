"""Where the loop's requests go on from what was computed for earlier ones, and what of theirs is kept
(`prefixes.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from tercel.decode.judge import Judged
from tercel.decode.prefixes import WORTH_WAITING, Known, Prefixes, shared
from tercel.decode.proposer import Proposer
from tercel.decode.request import ActiveRequest
from tercel.decode.types import Committed, Event
from tercel.target_model.kept import KeptTokens
from tercel.target_model.prefill import Prompt
from tercel.target_model.protocol import RowCache

NOTHING = Known()


@dataclass
class Entering:
    """A request whose prompt is being run; its row is among those after the running ones. started: by the clock.
    prompt: what is run of it, once that has begun; known: what was there already, without the target's once its row has
    that."""

    request: ActiveRequest
    started: float
    prompt: Prompt | None = None
    known: Known = NOTHING


@dataclass(frozen=True)
class Reuse:
    """Of one loop; prefixes: None where every prompt is run whole and nothing is kept."""

    prefixes: Prefixes | None
    proposer: Proposer

    def prompts(self, entering: Sequence[Entering], cache: RowCache, first: int) -> list[Prompt]:
        """The first prompts, those that may run now: one at its beginning goes on from what is known of it, and waits,
        with those behind it, while one before it is going to tell more. first: the row of the first."""
        prompts, known = list[Prompt](), dict[int, Sequence[KeptTokens]]()
        for place, one in enumerate(entering):
            if one.prompt is None:
                if self.prefixes is not None and not one.request.echo:  # whose prompt's output is wanted whole
                    tokens = one.request.prompt
                    if self._told(tokens, entering[:place]) >= self.prefixes.known(tokens) + WORTH_WAITING:
                        break
                    one.known = self.prefixes.take(tokens)
                    one.request.queried_tokens, one.request.cached_tokens = len(tokens), one.known.tokens
                    if one.known.target:
                        known[first + place] = one.known.target
                        one.known = replace(one.known, target=())  # the row has it, the store may forget it
                one.prompt = Prompt(one.request.prompt[one.known.tokens :])
            prompts.append(one.prompt)
        if known:
            cache.restore(known)
        return prompts

    def _told(self, tokens: Sequence[int], before: Sequence[Entering]) -> int:
        """How many of a prompt's first tokens those before it will leave when they have been run. One that ends with
        its first token leaves none: the proposer never reads it."""
        assert self.prefixes is not None
        texts = (other.request.prompt for other in before if other.request.params.max_new_tokens > 1)
        return min(max((shared(tokens, text) for text in texts), default=0), self.prefixes.room)

    def keep(self, cache: RowCache, row: int, request: ActiveRequest, last: Committed | None = None) -> None:
        """Keep what there is of a row's text, as far as it is committed. last: what its last step committed, if the
        proposer was not told."""
        if self.prefixes is not None:
            end = min(cache.lengths[row], len(request.tokens))  # an answer may be cut before its last path ends
            self.prefixes.keep(request.tokens[:end], partial(self._taken, cache, row, end, last))

    def keep_ended(
        self,
        cache: RowCache,
        requests: Sequence[ActiveRequest],
        judged: Judged,
        paths: Sequence[Sequence[int]],
        events: Sequence[Event],
    ) -> None:
        """The texts of rows whose answers ended in a step, but for those that failed. paths: of every row, root
        included."""
        rows = [row for row, event in enumerate(events) if event.emission.finish_reason not in (None, "error")]
        if self.prefixes is None or not rows:
            return
        tokens = [event.emission.tokens for event in events]
        cut = [list(path[: len(own)]) for path, own in zip(paths, tokens, strict=True)]
        committed = judged.block.committed(judged.output, cut, tokens, rows)
        for row, last in zip(rows, committed, strict=True):
            self.keep(cache, row, requests[row], last)

    def _taken(
        self, cache: RowCache, row: int, end: int, last: Committed | None, start: int
    ) -> tuple[KeptTokens, KeptTokens | None]:
        return cache.taken(row, start, end), self.proposer.taken(row, start, end, last)
