"""Servers on localhost that speak as vLLM, SGLang and llama.cpp do, with answers and counters decided beforehand."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from transformers import PreTrainedTokenizerBase

from tercel.decode.types import GenerationResult


@dataclass
class Fake:
    """results: the answer to each prompt, with the accepted drafts of its steps. chat: the prompt ids that the
    server's own template would give. extra_drafts: what others have drafted between two of our questions."""

    tokenizer: PreTrainedTokenizerBase
    results: Mapping[tuple[int, ...], GenerationResult]
    depth: int
    chat: Sequence[int] = ()
    token_ids: bool = True
    extra_drafts: int = 0
    drafts: int = 0
    accepted: list[int] = field(default_factory=list)
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.accepted = self.accepted or [0] * self.depth

    def answer(self, prompt: Sequence[int], limit: int) -> GenerationResult:
        result = self.results[tuple(prompt)]
        assert len(result.tokens) <= limit
        for count in result.accepted:
            self.drafts += 1
            for position in range(count):
                self.accepted[position] += 1
        self.drafts += self.extra_drafts
        return result

    def text(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def counters(self, prefix: str, labels: str) -> str:
        """A Prometheus page; other counters and comments stand between."""
        name, inside = f"{prefix}:spec_decode_num", f"{{{labels}}}" if labels else ""
        lines = [
            f"# HELP {name}_drafts_total Number of spec decoding drafts.",
            f"# TYPE {name}_drafts_total counter",
            f"{name}_drafts_total{inside} {float(self.drafts)}",
            f"{name}_drafts_created{inside} 1.7e+09",
            f"{name}_draft_tokens_total{inside} {self.drafts * self.depth}.0",
            f"{name}_accepted_tokens_total{inside} {float(sum(self.accepted))}",
            f"{prefix}:generation_tokens_total{inside} 12345.0",
        ]
        for position, count in enumerate(self.accepted):
            both = f'{labels},position="{position}"'.lstrip(",")
            lines.append(f"{name}_accepted_tokens_per_pos_total{{{both}}} {count}")
        return "\n".join(lines) + "\n"

    def get(self, path: str) -> Any:
        return None

    def post(self, path: str, body: dict[str, Any]) -> Any:
        return None


class FakeVllm(Fake):
    def get(self, path: str) -> Any:
        if path == "/metrics":
            return self.counters("vllm", 'model_name="tiny",engine="0"')
        return {"object": "list", "data": [{"id": "tiny"}]} if path == "/v1/models" else None

    def post(self, path: str, body: dict[str, Any]) -> Any:
        assert body["model"] == "tiny"
        assert body["temperature"] == 0
        if path == "/v1/completions":
            result = self.answer(body["prompt"], body["max_tokens"])
            choice: dict[str, Any] = {"text": self.text(result.tokens), "finish_reason": "length"}
            choice["token_ids"] = list(result.tokens) if self.token_ids and body["return_token_ids"] else None
            return {"choices": [choice], "usage": {"completion_tokens": len(result.tokens)}}
        if path == "/v1/chat/completions":
            ids = list(self.chat) if self.token_ids else None
            return {"choices": [{}], "prompt_token_ids": ids, "usage": {"prompt_tokens": len(self.chat)}}
        return None


@dataclass
class FakeSglang(Fake):
    """old: a version without the histogram, with its information at the old path."""

    old: bool = False
    top_k: int = 1

    def get(self, path: str) -> Any:
        if path == ("/get_server_info" if self.old else "/server_info"):
            steps = {"speculative_num_steps": self.depth, "speculative_eagle_topk": self.top_k}
            return {**steps, "speculative_num_draft_tokens": self.depth + 1, "internal_states": [{}]}
        return None

    def post(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/generate":
            result = self.answer(body["input_ids"], body["sampling_params"]["max_new_tokens"])
            meta: dict[str, Any] = {"completion_tokens": len(result.tokens), "spec_verify_ct": len(result.accepted)}
            if not self.old:
                histogram = [result.accepted.count(n) for n in range(max(result.accepted) + 1)]
                meta["spec_correct_drafts_histogram"] = histogram
                meta["spec_num_proposed_drafts"] = len(result.accepted) * self.depth
            return {"text": self.text(result.tokens), "output_ids": list(result.tokens), "meta_info": meta}
        if path == "/v1/chat/completions":
            return {"choices": [{}], "usage": {"prompt_tokens": len(self.chat)}}
        return None


@dataclass
class FakeLlama(Fake):
    """metrics: as started with `--metrics`."""

    metrics: bool = False

    def get(self, path: str) -> Any:
        if path == "/props":
            return {"default_generation_settings": {}, "total_slots": 1}
        return self.counters("llamacpp", "") if path == "/metrics" and self.metrics else None

    def post(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/completion":
            assert body["cache_prompt"] is False
            result = self.answer(body["prompt"], body["n_predict"])
            drafted, accepted, left = 0, 0, len(result.tokens) - 1
            for count in result.accepted:  # it never drafts beyond the answer's end
                drafted += min(self.depth, left - 1)
                accepted += min(count, left - 1)
                left -= min(count, left - 1) + 1
            timings = {"predicted_n": len(result.tokens), "draft_n": drafted, "draft_n_accepted": accepted}
            tokens = list(result.tokens) if self.token_ids else []
            return {"content": self.text(result.tokens), "tokens": tokens, "timings": timings}
        if path == "/apply-template":
            return {"prompt": "rendered"}
        return {"tokens": list(self.chat)} if path == "/tokenize" and body["content"] == "rendered" else None


@contextmanager
def running(fake: Fake) -> Iterator[str]:
    """The address of a server that answers as `fake` says, for as long as the block runs."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply(fake.get(self.path))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            fake.asked.append((self.path, body))
            self._reply(fake.post(self.path, body))

        def _reply(self, value: Any) -> None:
            text = value if isinstance(value, str) else json.dumps({"error": "not found"} if value is None else value)
            self.send_response(404 if value is None else 200)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
