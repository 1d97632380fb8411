"""A server that decodes with a head it has read wrongly gives the right text; its counters tell, and so does the
doctor, by name."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tercel.decode.types import GenerationResult
from tercel.doctor.clients import connect
from tercel.doctor.compare import ServingReport, compare_with_server
from tercel.doctor.findings import Finding, Level
from tercel.doctor.served_checks import PairedAcceptance, acceptance_finding
from tercel.draft import DraftModel
from tercel.errors import TercelError
from tercel.http.client import Http
from tercel.measure.causes import Cause
from tercel.measure.chains import read_as, without_map
from tercel.measure.intervals import Interval
from tests.doctor.servers_for_tests import Fake, FakeLlama, FakeSglang, FakeVllm, running
from tests.draft.heads_for_tests import tiny_head
from tests.overfit import ANSWER, QUESTIONS, STEPS, World


def compared(world: World, kind: type[Fake], loaded: DraftModel, **more: Any) -> ServingReport:
    """What the doctor finds at a server that decodes with `loaded`."""
    return asked(world, kind, world.decoded(loaded), **more)


def asked(
    world: World, kind: type[Fake], results: dict[tuple[int, ...], GenerationResult], **more: Any
) -> ServingReport:
    fake = kind(world.target.tokenizer, results, STEPS, **{"chat": world.prompts[0].tokens, **more})
    with running(fake) as url:
        return compare_with_server(connect(Http.at(url)), world.target, world.head, QUESTIONS, ANSWER)


def level(report: ServingReport, check: str) -> str:
    return next(finding.level for finding in report.findings if finding.check == check)


@pytest.mark.parametrize(
    ("kind", "more"),
    [(FakeVllm, {}), (FakeVllm, {"token_ids": False}), (FakeSglang, {}), (FakeSglang, {"old": True}), (FakeLlama, {})],
    ids=["vllm", "vllm-text", "sglang", "sglang-old", "llamacpp"],
)
def test_a_server_that_reads_the_head_rightly(world: World, kind: type[Fake], more: dict[str, Any]) -> None:
    report = compared(world, kind, world.head, **more)
    assert {finding.check: finding.level for finding in report.findings} == {
        "server template": "ok",
        "server text": "ok",
        "server acceptance": "ok",
    }
    assert (report.draft.depth, report.causes, report.same_text) == (STEPS, (), len(QUESTIONS))
    assert report.server.tau == report.tercel.tau
    if report.server.per_position is not None:
        assert report.tercel.per_position is not None
        assert [p.value for p in report.server.per_position] == [p.value for p in report.tercel.per_position]
    value = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert value["acceptance_server"]["tau_ci95"][0] > 3


MISREADINGS: dict[str, Callable[[DraftModel], DraftModel]] = {
    "layer ids +1": lambda head: read_as(head, feature_layers=(3, 5, 6)),
    "layer ids -1": lambda head: read_as(head, feature_layers=(1, 3, 4)),
    "norm_before_residual true": lambda head: read_as(head, norm_before_residual=True),
    "norm_output true": lambda head: read_as(head, norm_output=True),
}


@pytest.mark.parametrize(
    ("kind", "fault"), [*((FakeVllm, fault) for fault in MISREADINGS), (FakeSglang, "layer ids +1")]
)
def test_the_fault_is_named(world: World, kind: type[Fake], fault: str) -> None:
    report = compared(world, kind, MISREADINGS[fault](world.head))
    found = next(f for f in report.findings if f.check == "server acceptance")
    assert found.level == "problem"
    assert f"likely cause: {fault}" in found.found
    assert "tercel export" in found.advice
    assert level(report, "server text") == "ok"  # only the counters see it
    assert report.causes[0].explains
    assert report.ratio.high < 1


def test_a_head_without_its_map(world: World) -> None:
    report = compared(world, FakeVllm, without_map(world.head))
    found = next(f for f in report.findings if f.check == "server acceptance")
    assert found.level == "problem"
    assert "or with draft vocabulary without its map d2t" in found.found


def test_a_fault_is_found_where_positions_are_not_told(world: World) -> None:
    report = compared(world, FakeLlama, read_as(world.head, norm_output=True))
    assert report.server.per_position is None
    assert report.causes[0].setting == "norm_output true"


@pytest.mark.parametrize(
    ("ratio", "text", "level", "words"),
    [
        (Interval(1.0, 0.97, 1.02), "ok", "ok", "1.00 of it"),
        (Interval(0.92, 0.86, 1.03), "ok", "warning", "layer ids +1 would give 1.46"),
        (Interval(0.92, 0.86, 1.03), "note", "note", "as near as these prompts tell"),
        (Interval(0.92, 0.86, 0.99), "note", "problem", "likely cause: layer ids +1"),
        (Interval(0.92, math.nan, math.nan), "ok", "warning", "too few prompts"),
        (Interval(0.6, math.nan, math.nan), "ok", "problem", "likely cause: layer ids +1"),
        (Interval(0.6, 0.5, 0.7), "problem", "problem", "the server's target is not this one"),
    ],
)
def test_how_sure_a_shortfall_is(ratio: Interval, text: Level, level: str, words: str) -> None:
    there, here = (PairedAcceptance(Interval(tau, tau - 0.1, tau + 0.1), None) for tau in (1.46, 1.58))
    cause = Cause("layer ids +1", 1.46, 0.1, True, "export it")
    found = acceptance_finding("vllm", there, here, ratio, [cause], Finding("server text", text, ""))
    assert (found.level, words in found.found) == (level, True), found


def test_weights_that_were_not_loaded(world: World) -> None:
    random = replace(world.head, head=tiny_head(world.head.head.config, seed=5))
    report = compared(world, FakeVllm, random)
    found = next(f for f in report.findings if f.check == "server acceptance")
    assert found.level == "problem"
    assert "left random" in found.found


def test_another_target_behind_the_server(world: World) -> None:
    def other(result: GenerationResult) -> GenerationResult:
        tokens = tuple(4 + (token + 1) % 100 for token in result.tokens)
        return replace(result, tokens=tokens, accepted=(0,) * (ANSWER - 1))

    results = {prompt: other(result) for prompt, result in world.decoded(world.head).items()}
    report = asked(world, FakeVllm, results)
    assert level(report, "server text") == "problem"
    assert report.same_text == 0


def test_texts_that_part_late_are_no_problem(world: World) -> None:
    results = world.decoded(world.head)
    prompt, one = next(iter(results.items()))
    results[prompt] = replace(one, tokens=(*one.tokens[:-1], 4 + one.tokens[-1] % 100))
    assert level(asked(world, FakeVllm, results), "server text") == "note"


@pytest.mark.parametrize(("kind", "word"), [(FakeVllm, "from token 3 on"), (FakeSglang, "prompt tokens of a chat")])
def test_another_template_in_the_server(world: World, kind: type[Fake], word: str) -> None:
    chat = [*world.prompts[0].tokens[:2], 77, *world.prompts[0].tokens[2:]]
    report = compared(world, kind, world.head, chat=chat)
    found = next(f for f in report.findings if f.check == "server template")
    assert found.level == "problem"
    assert word in found.found


def test_others_use_the_server_too(world: World) -> None:
    report = compared(world, FakeVllm, world.head, extra_drafts=40)
    found = next(f for f in report.findings if f.check == "server acceptance")
    assert (found.level, report.causes) == ("warning", ())
    assert "cannot be compared" in found.found


def test_a_server_that_drafts_nothing(world: World) -> None:
    results = {p: replace(r, accepted=(), steps=0) for p, r in world.decoded(world.head).items()}
    with pytest.raises(TercelError, match=r"drafted nothing.*serve-command HEAD --engine vllm"):
        asked(world, FakeVllm, results)


class Boasting(FakeLlama):
    """Says that it drafts a thousand million tokens a step."""

    def counters(self, prefix: str, labels: str) -> str:
        page = super().counters(prefix, labels)
        return re.sub(r"(draft_tokens_total) .*", rf"\1 {self.drafts * 10**9}", page)


def test_a_depth_that_cannot_be_is_not_simulated(world: World) -> None:
    with pytest.raises(TercelError, match="reports 1000000000 as the depth of its drafts, which is impossible"):
        asked(world, Boasting, world.decoded(world.head), metrics=True)


def test_a_tree_is_compared_with_a_tree(world: World) -> None:
    report = compared(world, FakeSglang, world.head, top_k=2)
    assert report.draft.top_k == 2
    assert report.draft.nodes == STEPS + 1


def test_prompts_without_room_are_left_out(world: World) -> None:
    lengths = sorted(len(prompt.tokens) for prompt in world.prompts)
    short = read_as(world.head, max_position_embeddings=lengths[0] + ANSWER)
    fake = FakeVllm(world.target.tokenizer, world.decoded(world.head), STEPS, world.prompts[0].tokens)
    with running(fake) as url:
        report = compare_with_server(connect(Http.at(url)), world.target, short, QUESTIONS, ANSWER)
        assert 1 <= report.prompts < len(QUESTIONS)
        shorter = read_as(world.head, max_position_embeddings=lengths[0])
        with pytest.raises(TercelError, match="no prompt leaves room"):
            compare_with_server(connect(Http.at(url)), world.target, shorter, QUESTIONS, ANSWER)
