"""SGLang: `meta_info` of /generate, a histogram of accepted drafts a step."""

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
    openai_prompt,
    served,
    tried,
)
from tercel.draft.shape import TreeShape
from tercel.errors import TercelError
from tercel.http.client import Http, HttpStatusError
from tercel.measure.counts import MAX_DEPTH, MAX_NODES, Counts, number, told_shape


@dataclass(frozen=True)
class SglangClient(EngineClient):
    engine: ClassVar[str] = "sglang"

    http: Http

    @staticmethod
    def answers_at(http: Http) -> bool:
        return "speculative" in tried(http, "/server_info") or "speculative" in tried(http, "/get_server_info")

    def draft(self) -> TreeShape | None:
        """Raises `TercelError` for a server that runs without drafts."""
        try:
            info = self.http.get("/server_info")
        except HttpStatusError:
            info = self.http.get("/get_server_info")  # until 2025
        depth, top_k = info.get("speculative_num_steps"), info.get("speculative_eagle_topk")
        if not depth:
            raise TercelError(
                f"the server at {self.http.base} runs without speculative decoding; start it with the line that "
                "`tercel serve-command HEAD --engine sglang` prints"
            )
        depth = number(depth, "speculative_num_steps", MAX_DEPTH, least=1)
        return told_shape(depth, top_k or 1, info.get("speculative_num_draft_tokens") or None)

    def answer(self, prompt: Sequence[int], max_new_tokens: int) -> Served:
        sampling = {"temperature": 0.0, "max_new_tokens": max_new_tokens}
        reply = self.http.post("/generate", {"input_ids": list(prompt), "sampling_params": sampling})
        meta = mapping(reply.get("meta_info"))
        if "completion_tokens" not in meta:
            raise TercelError(f"{self.http.base}/generate answers without meta_info; is it a server of SGLang?")
        length = number(meta["completion_tokens"], "completion_tokens", most_tokens(max_new_tokens))
        counts = self._counts(meta, length)
        return served(reply.get("text"), ids(reply.get("output_ids")), length, max_new_tokens, counts)

    def _counts(self, meta: Mapping[str, Any], length: int) -> Counts:
        most = most_tokens(length)  # of its steps, and of what was accepted in them
        histogram = meta.get("spec_correct_drafts_histogram")  # [a]: steps with a accepted drafts
        drafted = number(meta.get("spec_num_proposed_drafts") or 0, "spec_num_proposed_drafts", most * MAX_NODES)
        if isinstance(histogram, list) and histogram:
            number(len(histogram), "the length of spec_correct_drafts_histogram", MAX_DEPTH + 1)
            steps = [number(count, "a count of spec_correct_drafts_histogram", most) for count in histogram]
            beyond = [sum(steps[i + 1 :]) for i in range(len(steps) - 1)]
            return Counts(sum(steps), drafted, sum(beyond), tuple(beyond))
        if meta.get("spec_verify_ct") is None:
            return Counts()
        verified = number(meta["spec_verify_ct"], "spec_verify_ct", most)
        # older servers tell the steps alone: each gives its accepted drafts and one token more
        return Counts(verified, drafted, max(0, length - 1 - verified))

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]) -> SeenPrompt:
        return openai_prompt(self.http, "default", messages, arguments)
