"""Four lines to text: `Engine(target, proposer).generate([Request(prompt, params)])`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tercel.decode.loop import DecodingLoop
from tercel.decode.prefixes import PrefixStore
from tercel.decode.proposer import Proposer
from tercel.decode.types import Event, GenerationResult, Request
from tercel.target_model.protocol import TargetModel


class Engine:
    """Generates with one target and one proposer, up to `slots` requests at a time.

    prefill_chunk: most prompt tokens of a step, as in `DecodingLoop`. prefix_cache: bytes in which is kept what was
    computed, for later requests that begin alike, such as a conversation's next turn; 0 keeps nothing.
    """

    def __init__(
        self,
        target: TargetModel,
        proposer: Proposer,
        *,
        slots: int = 1,
        prefill_chunk: int | None = None,
        prefix_cache: int = 0,
    ) -> None:
        self.target, self.proposer, self.slots, self.prefill_chunk = target, proposer, slots, prefill_chunk
        self.prefixes = PrefixStore(prefix_cache)

    def loop(self) -> DecodingLoop:
        """A fresh loop, for callers that submit requests as they come."""
        return DecodingLoop(self.target, self.proposer, self.slots, self.prefill_chunk, prefixes=self.prefixes)

    def stream(self, requests: Sequence[Request]) -> Iterator[Event]:
        """Events of all requests as they happen; `event.index` is the place in `requests`. One that fails ends alone:
        its last event has the finish reason "error", and its result the error."""
        loop = self.loop()
        for request in requests:
            loop.submit(request)
        while loop.pending:
            yield from loop.step()

    def generate(self, requests: Sequence[Request]) -> list[GenerationResult]:
        """All answers, in the order of the requests. Raises the error of the first that fails: whoever wants the
        others all the same listens to `stream`."""
        ended = ((event.index, event.result) for event in self.stream(requests) if event.result is not None)
        results = {index: result.require() for index, result in ended}
        return [results[index] for index in range(len(requests))]
