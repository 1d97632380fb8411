"""The one decoding loop: propose → verify → commit, for greedy and sampled, trees and chains, one row or many.

A generated token's life:
1. A request is submitted; when slots are free, prompts are prefilled together, straight into the rows that they will
   have in the batch, and the target chooses each first token.
2. `propose`: the proposer drafts a tree after the last token of every row.
3. The target runs all trees in one forward, each node seeing the committed tokens and its own ancestors.
4. `verify`: walk each tree as far as the target's own choices go; one more token is the target's own: recovered where
   other tokens were drafted, bonus where the tree ends.
5. Emission: the block is cut where token-by-token decoding would have stopped, and its stable text is given out.
6. `commit`: the accepted path becomes permanent in the target's cache, the rest is forgotten, and the proposer gets
   the target's true features of the path.

Shape legend: B rows, N nodes of the largest tree, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tercel import limits
from tercel.chat.panics import guarded
from tercel.decode.clock import PhaseClock
from tercel.decode.judge import judge
from tercel.decode.logprobs import TokenLogprob, prompt_logprobs, token_logprobs
from tercel.decode.prefixes import PrefixStore
from tercel.decode.proposer import Proposer
from tercel.decode.request import ActiveRequest
from tercel.decode.reuse import Entering, Reuse
from tercel.decode.sampling import choose_token
from tercel.decode.trace import StepTrace, trace_first, trace_rows
from tercel.decode.types import Event, Request
from tercel.decode.verify import Verdict
from tercel.errors import TercelError
from tercel.target_model.memory import CacheMemory
from tercel.target_model.output import TargetOutput
from tercel.target_model.prefill import CHUNK, run_chunk
from tercel.target_model.protocol import RowCache, TargetModel


class DecodingLoop:
    """Decodes submitted requests, up to `slots` at a time, with one proposer.

    prefill_chunk: most prompt tokens of a step, so that a long prompt does not hold up the answers beside it; None runs
    prompts to their end before the step goes on. clock: where the steps' time is booked, if not on one of its own.
    prefixes: where it is kept what was computed, for requests that begin alike; None keeps nothing.
    """

    def __init__(
        self,
        target: TargetModel,
        proposer: Proposer,
        slots: int = 1,
        prefill_chunk: int | None = None,
        clock: PhaseClock | None = None,
        prefixes: PrefixStore | None = None,
    ) -> None:
        if not 1 <= slots <= limits.SLOTS:
            raise TercelError(f"a decoding loop has 1 to {limits.SLOTS:,} slots, not {slots}")
        if prefill_chunk is not None and prefill_chunk < 1:
            raise TercelError(f"a decoding loop needs at least one prompt token a step, not {prefill_chunk}")
        if proposer.needs_tree:
            target.tree_support.require_tree(target.source.name)
        elif proposer.max_nodes > 1:
            target.tree_support.require_chain(target.source.name)
        self.target, self.proposer, self.slots = target, proposer, slots
        self._waiting: deque[ActiveRequest] = deque()
        self._entering: list[Entering] = []  # their rows in the cache come after those of
        self._rows: list[ActiveRequest] = []
        self._cache: RowCache = target.new_cache(0, 0)
        self._prefill_chunk = prefill_chunk
        self._reuse = Reuse(None if prefixes is None else prefixes.of(target, proposer), proposer)
        self._submitted = 0
        self._aborted: set[int] = set()  # requests that leave at the next step
        self._clock = PhaseClock(target.device) if clock is None else clock
        proposer.timed_by(self._clock)

    @property
    def pending(self) -> int:
        """Requests waiting or being decoded."""
        return len(self._waiting) + len(self._entering) + len(self._rows)

    @property
    def waiting(self) -> int:
        """Requests that have no slot yet."""
        return len(self._waiting)

    @property
    def memory(self) -> CacheMemory:
        """Of all caches: the target's, and the proposer's."""
        return self._cache.memory + self.proposer.memory

    def submit(self, request: Request) -> int:
        """Queue a request; returns its number. Raises `TercelError` if its prompt is empty or fills the context."""
        if not request.prompt:
            raise TercelError("the prompt is empty; give at least one token")
        if len(request.prompt) >= self.target.context_length:
            raise TercelError(
                f"the prompt has {len(request.prompt)} tokens, but {self.target.source.name} takes "
                f"{self.target.context_length} with the answer{self.target.why_no_longer}; shorten it"
            )
        self._waiting.append(ActiveRequest(self._submitted, request, self.target))
        self._submitted += 1
        return self._submitted - 1

    def abort(self, index: int) -> bool:
        """Let a request leave, wherever it is: the next step begins with its last event, of finish reason "abort" and
        with the answer so far, and its slot is free. Returns whether it was still there."""
        entering = (entering.request for entering in self._entering)
        there = any(request.index == index for request in (*self._waiting, *entering, *self._rows))
        if there:
            self._aborted.add(index)
        return there

    def step(self) -> list[Event]:
        """Admit what fits, then propose, verify and commit once for every row. Returns what became known.

        A request that fails by itself, in its logits, its processors or its text, ends with an event of finish reason
        "error"; no other row notices.
        """
        with self.target.beside():
            events = self._let_go() if self._aborted else []
            events += self._admit()
            if self._rows:
                events += self._advance()
        return events

    def _let_go(self) -> list[Event]:
        """Aborted requests leave the queue, the prompts in flight and the batch."""
        gone, self._aborted = self._aborted, set()
        running = len(self._rows)
        held = [*self._rows, *(entering.request for entering in self._entering)]  # as in the cache
        stay = [place for place, request in enumerate(held) if request.index not in gone]
        for place, row in enumerate(self._rows):
            if row.index in gone:
                self._reuse.keep(self._cache, place, row)
        if len(stay) < len(held):
            self._cache.select_rows(stay)
        if not gone.isdisjoint(row.index for row in self._rows):
            self.proposer.select_rows([place for place in stay if place < running])
        events = [request.abort() for request in (*held, *self._waiting) if request.index in gone]
        self._rows = [row for row in self._rows if row.index not in gone]
        self._entering = [entering for entering in self._entering if entering.request.index not in gone]
        self._waiting = deque(request for request in self._waiting if request.index not in gone)
        return events

    def _advance(self) -> list[Event]:
        """One step of every running row (names end in their shape):

            trees_B   = propose(rows)                        a tree each, its root the row's last token
            hidden_BNK, layers_BNK = target(trees_B)         one forward; cache: + N slots, not committed
            logits_BNV = output_layer(hidden_BNK)
            verdicts_B = verify(trees_B, logits_BNV)         a path of a accepted nodes, and the bonus token
            a row that failed with its tree: once more, without
            traces_B   = trace(verdicts_B, logits_BNV)       of the rows that ask for a record of their steps
            events_B   = take(verdicts_B)                    a + 1 tokens, cut where the answer ends; text
            keep(root and path of every row)                 cache: a + 1 slots stay, the rest is forgotten
            keep(texts of rows that ended)                   prefixes: for requests that begin alike
            leave(rows that ended or failed)                 in cache and proposer
            commit(a + 1 tokens, layers of root and path)    the proposer's true features, for those who stay

        What a row does by itself (verify, take) may fail without the others; what all do together may not. Time is
        booked by phase to every row that took part; that of making records, to none.
        """
        clock, before = self._clock, dict(self._clock.seconds)
        clock.restart()
        started = clock.now()
        with clock.phase("target"):
            self.target.renew(self._cache, [row.tokens for row in self._rows])
        with clock.phase("tree"):
            depths = [self.target.block_depth(length) for length in self._cache.lengths[: len(self._rows)]]
            proposals = [p.up_to(depth) for p, depth in zip(self.proposer.propose(self._rows), depths, strict=True)]
        judged = judge(self.target, self.proposer, self._cache, self._rows, proposals, clock)
        block, logits, verdicts = judged.block, judged.logits, judged.verdicts
        traces: list[StepTrace | None] = [None] * len(self._rows)
        if any(row.traced for row in self._rows):
            stopped = clock.now()
            traces = trace_rows(self._rows, block.proposals, logits, verdicts)
            started += clock.now() - stopped
            clock.restart()
        with guarded(hush=True):  # once, not for every piece of text
            events = [
                self._take(row, verdict, len(proposal.tree), scores, trace)
                for row, verdict, proposal, scores, trace in zip(
                    self._rows, verdicts, block.proposals, logits, traces, strict=True
                )
            ]
        paths = [[0, *verdict.path] if isinstance(verdict, Verdict) else [0] for verdict in verdicts]
        with clock.phase("cache"):
            self._cache.keep(paths)
            survivors = _closed_up([event.emission.finish_reason is None for event in events])
            self._reuse.keep_ended(self._cache, self._rows, judged, paths, events)
            if len(survivors) < len(events):
                self._cache.select_rows([*survivors, *range(len(events), len(self._cache.lengths))])
                self.proposer.select_rows(survivors)
        with clock.phase("tree"):
            if survivors:
                tokens = [event.emission.tokens for event in events]
                self.proposer.commit(block.committed(judged.output, paths, tokens, survivors))
        seconds = clock.now() - started
        spent = {phase: clock.seconds[phase] - before[phase] for phase in before}
        finished = [row.spend(event, seconds, spent) for row, event in zip(self._rows, events, strict=True)]
        self._rows = [self._rows[i] for i in survivors]
        return finished

    def _take(
        self, row: ActiveRequest, verdict: Verdict | Exception, nodes: int, logits: Tensor, trace: StepTrace | None
    ) -> Event:
        """logits: `[N, V]` of the row's tree."""
        if isinstance(verdict, Exception):
            return row.fail(verdict)
        try:  # first what may fail: a block that was taken is part of the answer
            many = row.logprobs
            told = () if many is None else token_logprobs(logits[[0, *verdict.path]], verdict.tokens, many)
            event = row.take(verdict, nodes)
        except Exception as error:  # of the tokenizer, over this row's text
            return row.fail(error)
        return replace(event, trace=trace, logprobs=told[: len(event.emission.tokens)])

    def _admit(self) -> list[Event]:
        """Run prompts of waiting requests as far as slots and this step allow; each that ends yields a first token."""
        events: list[Event] = []
        while self._begin_prompts():
            events += self._run_prompts()
            if self._prefill_chunk is not None:
                break
        return events

    def _begin_prompts(self) -> bool:
        """Give waiting requests the free slots; says whether any prompt is to be run."""
        free = self.slots - len(self._rows) - len(self._entering)
        new = [self._waiting.popleft() for _ in range(min(free, len(self._waiting)))]
        if new:
            capacity = max(map(self._capacity, new))
            if not self._rows and not self._entering:
                self._cache = self.target.new_cache(0, capacity)
                self.proposer.reset(capacity)
            self._cache.add_rows(len(new), capacity)
            started = self._clock.now()
            self._entering += [Entering(request, started) for request in new]
        return bool(self._entering)

    def _run_prompts(self) -> list[Event]:
        """One chunk of the prompts in flight; those that end join the batch, or leave with their only token."""
        first, layers = len(self._rows), self.proposer.feature_layers
        prompts = self._reuse.prompts(self._entering, self._cache, first)
        rows = range(first, first + len(prompts))
        done = run_chunk(self.target, prompts, self._cache, rows, self._prefill_chunk or CHUNK, layers)
        ended, self._entering = self._entering[:done], self._entering[done:]
        outputs = [prompt.output for prompt in prompts[:done]]
        events = self._start([entering.request for entering in ended], outputs)
        stay = [i for i, event in enumerate(events) if event.emission.finish_reason is None]
        if len(stay) < done:
            others = range(first + done, len(self._cache.lengths))
            self._cache.select_rows([*range(first), *(first + i for i in stay), *others])
        if stay:
            joining = [ended[i].request for i in stay]
            self._rows += joining
            self.proposer.resume([ended[i].known.proposer for i in stay])
            self.proposer.admit(joining, [outputs[i] for i in stay])
            for place, request in enumerate(joining, first):
                self._reuse.keep(self._cache, place, request)
        now = self._clock.now()
        return [e.request.prefilled(event, now - e.started) for e, event in zip(ended, events, strict=True)]

    def _start(self, requests: Sequence[ActiveRequest], outputs: Sequence[TargetOutput]) -> list[Event]:
        """The first token of each, whose prompt gave `output`."""
        if not requests:
            return []
        events = []
        last = self.target.logits(torch.cat([output.hidden[0, -1:] for output in outputs]))  # one layer for all
        for request, output, logits in zip(requests, outputs, last, strict=True):
            try:
                token = choose_token(logits, request.params, request.history, request.stream)
                trace = trace_first(request, logits, token) if request.traced else None
                told, before = self._told(request, token, output, logits)
                event = replace(request.start(token), trace=trace, logprobs=told, prompt_logprobs=before)
            except Exception as error:  # as in `judge` and `_take`
                event = request.fail(error)
            events.append(event)
        return events

    def _told(
        self, request: ActiveRequest, token: int, output: TargetOutput, logits: Tensor
    ) -> tuple[tuple[TokenLogprob, ...], tuple[TokenLogprob, ...]]:
        """How likely the first token was, by `logits` `[V]`, and each of the prompt's, as far as that is wanted."""
        many = request.logprobs
        if many is None:
            return (), ()
        first = token_logprobs(logits[None], (token,), many)
        return first, prompt_logprobs(self.target, output.hidden[0], request.prompt, many) if request.echo else ()

    def _capacity(self, request: ActiveRequest) -> int:
        longest = len(request.prompt) + request.params.max_new_tokens
        return min(longest, self.target.context_length) + self.proposer.max_nodes


def _closed_up(stay: Sequence[bool]) -> list[int]:
    """The rows that stay: the last of them take the places of those that leave, so that no other is moved."""
    count = sum(stay)
    last = (row for row in range(count, len(stay)) if stay[row])
    return [row if stay[row] else next(last) for row in range(count)]
