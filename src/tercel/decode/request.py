"""One request on its way through the loop: tokens so far, random numbers, stop rules, counters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tercel.decode.history import TokenHistory
from tercel.decode.sampling import RandomStream
from tercel.decode.stopping import StopChecker
from tercel.decode.types import Event, GenerationResult, Request
from tercel.decode.verify import Verdict
from tercel.target_model.protocol import TargetModel


class ActiveRequest:
    """State of a request from submission to its last token."""

    def __init__(self, index: int, request: Request, target: TargetModel) -> None:
        self.index = index
        self.prompt = request.prompt
        self.params = request.params
        self.logprobs, self.echo, self.traced = request.logprobs, request.echo, request.traced
        constraint = None if request.constraint is None else request.constraint()
        self.history = TokenHistory(request.prompt, target.vocab_size, constraint)
        self.stream = RandomStream(request.params.seed)
        self._stop = StopChecker(
            request.params,
            target.eos_token_ids,
            target.tokenizer_or_none if request.text else None,
            context_room=target.context_length - len(request.prompt),
        )
        self.queried_tokens = self.cached_tokens = 0  # of the prompt: looked for, and found, among what was kept
        self._tokens = list(request.prompt)
        self._accepted: list[int] = []
        self._nodes = 0
        self._prefill_seconds = 0.0
        self._decode_seconds = 0.0
        self._split: dict[str, float] = {}
        self._error: Exception | None = None

    @property
    def tokens(self) -> Sequence[int]:
        """Prompt and answer so far."""
        return self._tokens

    def start(self, token: int) -> Event:
        """The first token, which prefill gave."""
        return self._feed((token,), 0)

    def take(self, verdict: Verdict, nodes: int) -> Event:
        """A verified block, cut where the answer ends."""
        self._nodes += nodes
        event = replace(self._feed(verdict.tokens, len(verdict.path)), nodes=nodes)
        self._accepted.append(event.drafted)
        return event

    def abort(self) -> Event:
        """The last event of a request that somebody else ends."""
        return self._close(Event(self.index, self._stop.interrupt("abort"), 0))

    def fail(self, error: Exception) -> Event:
        """The end of a request that cannot go on for a reason of its own."""
        self._error = error
        return Event(self.index, self._stop.interrupt("error"), 0)

    def _feed(self, block: Sequence[int], drafted: int) -> Event:
        emission = self._stop.feed(block)
        for token in emission.tokens:
            self.history.push(token)
        self._tokens.extend(emission.tokens)
        return Event(self.index, emission, min(drafted, len(emission.tokens)))

    def prefilled(self, event: Event, seconds: float) -> Event:
        """Book the time of prefill; completes an event that was the last."""
        self._prefill_seconds = seconds
        return self._close(event)

    def spend(self, event: Event, seconds: float, split: dict[str, float]) -> Event:
        """Book the time of a step; completes an event that was the last."""
        self._decode_seconds += seconds
        for phase, value in split.items():
            self._split[phase] = self._split.get(phase, 0.0) + value
        if event.trace is not None:
            event = replace(event, trace=replace(event.trace, split=split))
        return self._close(event)

    def _close(self, event: Event) -> Event:
        if event.emission.finish_reason is None:
            return event
        result = GenerationResult(
            tokens=tuple(self._stop.tokens),
            text=self._stop.text,
            finish_reason=event.emission.finish_reason,
            prompt_tokens=len(self.prompt),
            steps=len(self._accepted),
            accepted=tuple(self._accepted),
            nodes=self._nodes,
            prefill_seconds=self._prefill_seconds,
            decode_seconds=self._decode_seconds,
            split=dict(self._split),
            error=self._error,
            queried_tokens=self.queried_tokens,
            cached_tokens=self.cached_tokens,
        )
        return replace(event, result=result)
