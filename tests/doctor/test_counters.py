"""Numbers of servers that cannot be true: one sentence each, and nothing here grows with them."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import pytest

from tercel.decode.types import GenerationResult
from tercel.doctor.clients import connect
from tercel.doctor.engine_client import EngineClient
from tercel.doctor.prometheus import read_counters
from tercel.errors import TercelError
from tercel.http.client import Http
from tercel.measure.counts import Counts, told_shape
from tests.doctor.servers_for_tests import Fake, FakeLlama, FakeSglang, FakeVllm, running
from tests.tiny import tiny_tokenizer

PROMPT = (5, 6, 7)
RESULTS = {PROMPT: GenerationResult((40, 41, 42, 43), "", "length", 2, 2, (2, 0), 12, 0.0, 0.0, {})}


def fake(kind: type[Fake]) -> Fake:
    return kind(tiny_tokenizer(), RESULTS, 3, chat=(1, 2, 3, 4))


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-1", "0.5", "1e300", "x", "1e9999", "9" * 5000])
def test_counters_that_cannot_be_true(value: str) -> None:
    with pytest.raises(TercelError, match=r"reports .* as vllm:spec_decode_num_drafts_total, which is impossible"):
        read_counters(f"vllm:spec_decode_num_drafts_total {value}\n", "vllm")


def test_pages_of_counters_that_are_too_much() -> None:
    line = 'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{}"}} 1\n'
    page = "vllm:spec_decode_num_drafts_total 1\n" + "".join(map(line.format, range(1000)))
    with pytest.raises(TercelError, match="1000 as the number of positions"):
        read_counters(page, "vllm")
    assert read_counters("vllm:spec_decode_num_drafts_total{" + "}" * 1_000_000, "vllm") is None
    assert read_counters("vllm:spec_decode_" + "a" * 1_000_000, "vllm") is None


def test_counters_that_went_back() -> None:
    for now in (Counts(1), Counts(2, 0, 0, (3,)), Counts(2, 0, 3, (4, 0))):
        with pytest.raises(TercelError, match="went backwards"):
            now.since(Counts(2, 0, 1, (4, 2)))


@pytest.mark.parametrize("shape", [(10**9,), (-1,), (0,), (math.nan,), ("3",), (3, 10**9), (3, 1, 10**9), (True,)])
def test_shapes_that_no_engine_has(shape: tuple[Any, ...]) -> None:
    with pytest.raises(TercelError, match="drafts, which is impossible"):
        told_shape(*shape)


class Lying:
    """Replies with `changes` in them; a key of the form `a.b` is inside `a`."""

    changes: ClassVar[dict[str, Any]] = {}

    def changed(self, reply: Any) -> Any:
        for key, value in self.changes.items() if isinstance(reply, dict) else ():
            *outer, last = key.split(".")
            inside = reply
            for name in outer:
                inside = inside[int(name)] if name.isdigit() else inside.get(name, {})
            if last in inside:
                inside[last] = value
        return reply


class LyingVllm(Lying, FakeVllm):
    def post(self, path: str, body: dict[str, Any]) -> Any:
        return self.changed(super().post(path, body))


class LyingSglang(Lying, FakeSglang):
    def get(self, path: str) -> Any:
        return self.changed(super().get(path))

    def post(self, path: str, body: dict[str, Any]) -> Any:
        return self.changed(super().post(path, body))


class LyingLlama(Lying, FakeLlama):
    def post(self, path: str, body: dict[str, Any]) -> Any:
        return self.changed(super().post(path, body))


HISTOGRAM = "meta_info.spec_correct_drafts_histogram"


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (LyingVllm, {"choices.0.token_ids": list(range(1000))}),
        (LyingVllm, {"choices.0.token_ids": None, "usage.completion_tokens": 10**9}),
        (LyingVllm, {"choices.0.token_ids": None, "usage.completion_tokens": "many"}),
        (LyingVllm, {"choices.0.text": "x" * 1_000_000}),
        (LyingVllm, {"choices.0.text": ["x"]}),
        (LyingVllm, {"choices": [[]]}),
        (LyingSglang, {"meta_info.completion_tokens": 10**9}),
        (LyingSglang, {"meta_info.completion_tokens": -1}),
        (LyingSglang, {"meta_info": [1]}),
        (LyingSglang, {HISTOGRAM: [1] * 100_000}),
        (LyingSglang, {HISTOGRAM: [10**9]}),
        (LyingSglang, {HISTOGRAM: [None]}),
        (LyingSglang, {HISTOGRAM: None, "meta_info.spec_verify_ct": 1e18}),
        (LyingSglang, {"meta_info.spec_num_proposed_drafts": "3"}),
        (LyingSglang, {"speculative_num_steps": 10**9}),
        (LyingSglang, {"speculative_num_steps": "three"}),
        (LyingSglang, {"speculative_eagle_topk": 10**9}),
        (LyingSglang, {"speculative_num_draft_tokens": 10**9}),
        (LyingLlama, {"timings.predicted_n": 10**9}),
        (LyingLlama, {"timings.draft_n": 10**12}),
        (LyingLlama, {"timings.draft_n_accepted": -3}),
        (LyingLlama, {"timings": "fast"}),
        (LyingLlama, {"prompt": 3}),
    ],
)
def test_answers_that_cannot_be_true(
    kind: type[Fake], changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Lying, "changes", changes)
    with running(fake(kind)) as url, pytest.raises(TercelError, match=r"which is impossible|is it a server|look at"):
        ask_everything(connect(Http.at(url)))


def ask_everything(server: EngineClient) -> None:
    server.draft()
    server.answer(PROMPT, 16)
    server.chat_prompt([{"role": "user", "content": "hi"}], {})


def test_halves_of_characters_in_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lying, "changes", {"choices.0.text": "a\ud800b"})
    with running(fake(LyingVllm)) as url:
        assert connect(Http.at(url), "vllm").answer(PROMPT, 16).text == "a?b"
