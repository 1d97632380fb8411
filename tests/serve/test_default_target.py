"""The default target as a user serves it on a CPU: computed by OpenVINO, in bfloat16, with its shipped head."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tercel.decode.compat import load_draft
from tercel.decode.engine import Engine
from tercel.decode.generation_config import sampling_for
from tercel.decode.proposers import EAGLE3, make_proposer
from tercel.decode.types import Request
from tercel.decode.vanilla import Vanilla
from tercel.draft.shape import TreeShape
from tercel.target_model.backends import load_target
from tests.serve.servers import serving

QUESTIONS = ("Why is the sky blue?", "List three uses of a brick.", "Write a limerick about a falcon.")
LONG = "The falcon waits on the rock above the river and looks for a pigeon. " * 20  # more than a chunk of prefill


@pytest.mark.real
def test_openvino_answers_many_at_once_each_as_alone() -> None:
    """Short and long prompts, greedy and drawn, whole and streamed, with drafts and without, on four seats."""
    pytest.importorskip("openvino", reason="openvino is not installed: pip install 'tercel[openvino]'")
    target = load_target("smollm2-135m", dtype=torch.bfloat16, backend="openvino")
    assert target.backend == "openvino"
    asked: list[dict[str, Any]] = [
        {"temperature": 0, "max_tokens": 12},
        {"temperature": 0, "max_tokens": 16, "stream": True},
        {"temperature": 0.8, "seed": 5, "max_tokens": 12, "stream": True, "draft": False},
        {"temperature": 0.8, "top_p": 0.9, "seed": 6, "max_tokens": 12},
    ]
    requests, bodies = [], []
    for number in range(8):
        question, how = QUESTIONS[number % 3], asked[number % 4]
        text = LONG + question if number in (2, 5) else question
        params = {name: value for name, value in how.items() if name in ("temperature", "top_p", "seed")}
        sample, most = how["temperature"] > 0, how["max_tokens"]
        requests.append(Request.chat(target, text, sampling_for(target, sample=sample, max_new_tokens=most, **params)))
        bodies.append({**how, "messages": [{"role": "user", "content": text}], "return_token_ids": True})
    truth = [list(Engine(target, Vanilla()).generate([request])[0].tokens) for request in requests]
    target.expect_many()
    head = make_proposer(EAGLE3, target, head=load_draft("smollm2-135m", target), shape=TreeShape(3, 3, 8))
    with serving(target, head, slots=4, prefill_chunk=128) as server, server.openai() as client:

        def ask(body: dict[str, Any]) -> list[int]:
            fields = {name: body[name] for name in ("draft", "return_token_ids") if name in body}
            known = {name: value for name, value in body.items() if name not in fields}
            answer = client.chat.completions.create(model="tiny", **known, extra_body=fields)
            if "stream" not in body:
                return answer.choices[0].token_ids
            parts = [chunk.choices[0] for chunk in answer if chunk.choices]
            return [token for part in parts for token in getattr(part, "token_ids", None) or ()]

        with ThreadPoolExecutor(len(bodies)) as pool:
            answers = list(pool.map(ask, bodies))
        with server.http() as http:
            page = http.get("/metrics").text
    assert answers == truth
    accepted = next(line for line in page.splitlines() if line.startswith("vllm:spec_decode_num_accepted_tokens_total"))
    assert float(accepted.split()[-1]) > 0
