"""llama.cpp: `timings` of /completion; with `--metrics` the counters `llamacpp:spec_decode_*` as well."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from tercel.doctor.engine_client import (
    EngineClient,
    SeenPrompt,
    Served,
    ids,
    mapping,
    most_tokens,
    served,
    template_kwargs,
    tried,
)
from tercel.doctor.prometheus import read_counters
from tercel.draft.shape import TreeShape
from tercel.errors import TercelError
from tercel.http.client import Http
from tercel.measure.counts import MAX_NODES, Counts, number


@dataclass(frozen=True)
class LlamaCppClient(EngineClient):
    engine: ClassVar[str] = "llamacpp"

    http: Http

    @staticmethod
    def answers_at(http: Http) -> bool:
        return "default_generation_settings" in tried(http, "/props")

    def _counters(self) -> Counts | None:
        """None for a server that was started without `--metrics`."""
        return read_counters(tried(self.http, "/metrics"), "llamacpp")

    def draft(self) -> TreeShape | None:
        return None

    def answer(self, prompt: Sequence[int], max_new_tokens: int) -> Served:
        before = self._counters()
        body = {
            "prompt": list(prompt),
            "n_predict": max_new_tokens,
            "temperature": 0.0,
            "repeat_penalty": 1.0,
            "return_tokens": True,
            "cache_prompt": False,
        }
        reply = self.http.post("/completion", body)
        timings, most = mapping(reply.get("timings")), most_tokens(max_new_tokens)
        if "predicted_n" not in timings:
            raise TercelError(f"{self.http.base}/completion answers without timings; is it a server of llama.cpp?")
        length = number(timings["predicted_n"], "predicted_n", most)
        drafted = number(timings.get("draft_n", 0), "draft_n", most * MAX_NODES)
        accepted, after = number(timings.get("draft_n_accepted", 0), "draft_n_accepted", most), self._counters()
        steps = max(0, length - 1 - accepted) if drafted else 0
        counts = after.since(before) if after and before else Counts(steps, drafted, accepted)
        return served(reply.get("content"), ids(reply.get("tokens")) or None, length, max_new_tokens, counts)

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]) -> SeenPrompt:
        asked = {"messages": [dict(m) for m in messages], **template_kwargs(arguments)}
        text = self.http.post("/apply-template", asked).get("prompt")
        if not isinstance(text, str):
            raise TercelError(f"{self.http.base}/apply-template gives no prompt; is it a server of llama.cpp?")
        body = {"content": text, "add_special": True, "parse_special": True}  # as its own chat route does
        tokens = ids(self.http.post("/tokenize", body).get("tokens"))
        if tokens is None:
            raise TercelError(f"{self.http.base}/tokenize gives no tokens; is it a server of llama.cpp?")
        return SeenPrompt(tokens, len(tokens))
