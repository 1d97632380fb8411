"""Counters for Prometheus, under the names that vLLM gives them: dashboards and `tercel doctor --url` know those."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from tercel.decode.types import Event

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_LABELS = ("model_name", "engine")


class Metrics:
    """Of one server. depth: draft tokens that can be accepted in a step, where that is known; 0 for a server without
    drafts, whose page has no counters of them. load: requests that are decoded, and that wait."""

    def __init__(self, name: str, drafts: bool, depth: int, load: Callable[[], tuple[int, int]]) -> None:
        self._registry, self._of = CollectorRegistry(), (name, "0")
        self._drafts: Any = None
        self._drafted: Any = None
        self._accepted: Any = None
        self._places: Any = None
        if drafts:
            self._drafts = self._counter("spec_decode_num_drafts", "Steps with drafts.")
            self._drafted = self._counter("spec_decode_num_draft_tokens", "Tokens drafted and verified.")
            self._accepted = self._counter("spec_decode_num_accepted_tokens", "Drafts accepted.")
            self._places = Counter(
                "vllm:spec_decode_num_accepted_tokens_per_pos",
                "Drafts accepted at each position.",
                (*_LABELS, "position"),
                registry=self._registry,
            )
            for position in range(depth):
                self._places.labels(*self._of, str(position))
        self._prompt = self._counter("prompt_tokens", "Prompt tokens of requests that ended.")
        self._asked = self._counter("prefix_cache_queries", "Prompt tokens looked for in the prefix cache.")
        self._found = self._counter("prefix_cache_hits", "Prompt tokens found there, which were not run again.")
        self._generated = self._counter("generation_tokens", "Tokens generated.")
        labels = (*_LABELS, "finished_reason")
        self._ended = Counter("vllm:request_success", "Answers by how they ended.", labels, registry=self._registry)
        self.first = self._histogram("time_to_first_token_seconds", "From a request's coming to its first token.")
        self.between = self._histogram("inter_token_latency_seconds", "Between tokens, a step's shared among its own.")
        self.whole = self._histogram("e2e_request_latency_seconds", "From a request's coming to its end.")
        for place, (key, about) in enumerate((("running", "being decoded"), ("waiting", "waiting for a slot"))):
            gauge = Gauge(f"vllm:num_requests_{key}", f"Requests {about}.", _LABELS, registry=self._registry)
            gauge.labels(*self._of).set_function(partial(lambda place: float(load()[place]), place))

    def stepped(self, event: Event) -> None:
        """Count what became known of one request."""
        self._generated.inc(len(event.emission.tokens))
        if event.nodes > 1:
            self._drafts.inc()
            self._drafted.inc(event.nodes - 1)
            self._accepted.inc(event.drafted)
            for position in range(event.drafted):
                self._places.labels(*self._of, str(position)).inc()
        if event.result is not None:
            self._prompt.inc(event.result.prompt_tokens)
            self._asked.inc(event.result.queried_tokens)
            self._found.inc(event.result.cached_tokens)
            self._ended.labels(*self._of, event.result.finish_reason).inc()

    def page(self) -> bytes:
        return generate_latest(self._registry)

    def _counter(self, name: str, about: str) -> Any:
        return Counter(f"vllm:{name}", about, _LABELS, registry=self._registry).labels(*self._of)

    def _histogram(self, name: str, about: str) -> Any:
        return Histogram(f"vllm:{name}", about, _LABELS, registry=self._registry, buckets=_SECONDS).labels(*self._of)
