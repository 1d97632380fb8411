"""What a server's steps take, by a clock that the server itself moves."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tercel.decode.types import GenerationResult
from tercel.doctor.engine_client import EngineClient, SeenPrompt, Served
from tercel.doctor.step_time import time_steps
from tercel.draft.shape import TreeShape
from tercel.errors import TercelError
from tercel.http.client import Http
from tercel.measure.counts import Counts
from tercel.measure.tasks import Prompt
from tests.cli.running import run
from tests.doctor.servers_for_tests import FakeVllm, running
from tests.overfit import ANSWER, STEPS, TEXTS, World

PROMPTS = [Prompt("a", (1, 2, 3)), Prompt("b", (4, 5, 6, 7))]


@dataclass
class Slow(EngineClient):
    """Prefill takes as long as the prompt, a second a token, unless it is cached; a step of three drafts 0.02 s."""

    engine: ClassVar[str] = "vllm"
    http: Http = field(default_factory=lambda: Http("http://nowhere"))
    caches: bool = True
    drafts: bool = True
    now: float = 0.0
    seen: set[tuple[int, ...]] = field(default_factory=set)

    @staticmethod
    def answers_at(http: Http) -> bool:
        return False

    def draft(self) -> TreeShape | None:
        return TreeShape.chain(3)

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]) -> SeenPrompt:
        raise AssertionError

    def answer(self, prompt: Sequence[int], max_new_tokens: int) -> Served:
        self.now += 0.001 if self.caches and tuple(prompt) in self.seen else float(len(prompt))
        self.seen.add(tuple(prompt))
        steps = (max_new_tokens - 1) // 2  # of two tokens each
        self.now += 0.02 * steps
        counts = Counts(steps, 3 * steps, steps) if self.drafts else Counts()
        return Served("", None, max_new_tokens, counts)


@pytest.mark.parametrize("caches", [True, False])
def test_what_a_prompt_takes_is_no_part_of_a_step(caches: bool) -> None:
    server = Slow(caches=caches)
    served = time_steps(server, PROMPTS, 21, clock=lambda: server.now)
    assert served.ms.value == pytest.approx(20.0)
    assert served.tau.value == 2.0
    assert served.token_ms == pytest.approx(10.0)
    assert served.draft == TreeShape.chain(3)
    assert "pays if without a head it gives fewer than 100 tokens/s" in served.sentence("vLLM")
    assert served.to_json()["step_ms"] == pytest.approx(20.0)


def test_a_server_that_cannot_be_timed() -> None:
    server = Slow(drafts=False)
    with pytest.raises(TercelError, match="drafted nothing"):
        time_steps(server, PROMPTS, 21, clock=lambda: server.now)
    with pytest.raises(TercelError, match="too short to time"):
        time_steps(Slow(), PROMPTS, 21, clock=lambda: 0.0)  # a clock that stands still


class Cutting(FakeVllm):
    """Its answers end where they are to."""

    def answer(self, prompt: Sequence[int], limit: int) -> GenerationResult:
        whole = self.results[tuple(prompt)]
        if limit > 1:
            return super().answer(prompt, limit)
        return replace(whole, tokens=whole.tokens[:1], accepted=())


def test_a_running_server(world: World, tmp_path: Path) -> None:
    data, costs, out = tmp_path / "my.jsonl", tmp_path / "costs.json", tmp_path / "tune.json"
    data.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in TEXTS), encoding="utf-8")
    costs.write_text('{"1": 0.000001}', encoding="utf-8")
    asked = ["tune", str(world.folder), str(world.head_folder), "--data", str(data), "--engine", "vllm"]
    asked += ["--max-new-tokens", str(ANSWER), "--dtype", "float32", "--longest", "4", "--json", str(out)]
    with running(Cutting(world.target.tokenizer, world.decoded(world.head), STEPS)) as url:
        ended = run(*asked, "--url", url)
        assert ended.code == 0, ended.err
        value = json.loads(out.read_text("utf-8"))
        assert value["server"]["speculative_tokens"] == STEPS
        assert value["server"]["tau"] == pytest.approx(value["settings"][STEPS - 1]["tau"])
        assert value["costs"] is None
        assert f"vLLM runs with a chain of {STEPS} now" in " ".join(ended.out.split())
        both = run(*asked, "--url", url, "--cost-json", str(costs))
        assert both.code == 0, both.err
    value = json.loads(out.read_text("utf-8"))
    assert value["costs"]["forward"][str(STEPS + 1)] == pytest.approx(value["server"]["step_ms"])
    assert value["use"] is None  # a token that takes next to nothing is not to be outdone
    assert "do not speculate in vLLM" in both.out
