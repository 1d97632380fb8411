"""vLLM: counters at /metrics (`vllm:spec_decode_*`), read before and after every answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from tercel.doctor.engine_client import EngineClient, SeenPrompt, Served, first, ids, mapping, openai_prompt, served
from tercel.doctor.prometheus import read_counters
from tercel.draft.shape import TreeShape
from tercel.errors import TercelError
from tercel.http.client import Http
from tercel.measure.counts import Counts, told_shape


@dataclass(frozen=True)
class VllmClient(EngineClient):
    engine: ClassVar[str] = "vllm"

    http: Http

    @staticmethod
    def answers_at(http: Http) -> bool:
        """Without counters it is not told from other servers of OpenAI's interface."""
        return False

    def _counters(self) -> Counts:
        counts = read_counters(self.http.text("/metrics"), "vllm")
        if counts is None:
            raise TercelError(
                f"the server at {self.http.base} has no counters of speculative decoding, so it runs without a head; "
                "start it with the line that `tercel serve-command HEAD --engine vllm` prints"
            )
        return counts

    def _model(self) -> str:
        models = self.http.get("/v1/models").get("data")
        name = models[0].get("id") if isinstance(models, list) and models and isinstance(models[0], dict) else None
        if not isinstance(name, str):
            raise TercelError(f"{self.http.base}/v1/models names no model; is it a server of vLLM?")
        return name

    def draft(self) -> TreeShape | None:
        positions = self._counters().per_position
        return told_shape(len(positions)) if positions else None

    def answer(self, prompt: Sequence[int], max_new_tokens: int) -> Served:
        before = self._counters()
        body = {
            "model": self._model(),
            "prompt": list(prompt),
            "max_tokens": max_new_tokens,
            "temperature": 0.0,
            "top_p": 1.0,
            "repetition_penalty": 1.0,  # the model's own settings may bring another
            "return_token_ids": True,
        }
        reply = self.http.post("/v1/completions", body)
        choice, usage = first(reply, self.http), mapping(reply.get("usage"))
        tokens = ids(choice.get("token_ids"))
        length = len(tokens) if tokens is not None else usage.get("completion_tokens", 0)
        return served(choice.get("text"), tokens, length, max_new_tokens, self._counters().since(before))

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]) -> SeenPrompt:
        return openai_prompt(self.http, self._model(), messages, arguments)
