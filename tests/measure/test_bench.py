from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from rich.console import Console

from tercel.decode.engine import Engine
from tercel.decode.sampling import SamplingParams
from tercel.decode.types import Request
from tercel.draft.acceptance import NAlpha
from tercel.errors import TercelError
from tercel.measure.bench import BenchProgress, BenchSettings, run_bench
from tercel.measure.methods import EngineMethod, Run, TransformersMethod
from tercel.measure.report import bench_table, check_picture, plot_bench
from tercel.measure.tasks import Question, Task, load_task, prompt_ids
from tests.measure.worlds import OwnTree, chat_target, vanilla

PARAMS = SamplingParams(max_new_tokens=12)
TALK = Task("talk", (Question("q1", ("One?", "Two?")), Question("q2", ("Three?",))))


@dataclass
class Clockwork:
    """A method that always answers the same, in the same time."""

    name: str
    seconds: float
    steps: int
    tokens: tuple[int, ...] = (20, 21, 22, 23, 24)
    coupled: bool = True
    lossy: str | None = None
    log: list[tuple[str, tuple[int, ...], SamplingParams]] = field(default_factory=list)

    def run(self, prompt: tuple[int, ...], params: SamplingParams) -> Run:
        self.log.append((self.name, prompt, params))
        return Run(self.tokens, self.seconds, self.steps, (1, 1), 6, {"target": 0.4, "draft": 0.2})


def clockworks() -> tuple[dict[str, Clockwork], list[tuple[str, tuple[int, ...], SamplingParams]]]:
    log: list[tuple[str, tuple[int, ...], SamplingParams]] = []
    methods = {
        "vanilla": Clockwork("vanilla", 1.0, 4, log=log),
        "transformers": Clockwork("transformers", 2.0, 4, coupled=False, log=log),
        "eagle3": Clockwork("eagle3", 0.5, 2, tokens=(20, 21, 22, 23, 25), log=log),
    }
    return methods, log


def test_numbers_of_a_benchmark_by_hand() -> None:
    methods, _ = clockworks()
    report = run_bench(chat_target(), methods, [TALK], BenchSettings(PARAMS, head="head"))
    value = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert (value["target"], value["head"], value["dtype"], value["device"]) == (
        "tiny",
        "head",
        "float32",
        "cpu",
    )
    eagle = value["tasks"]["talk"]["eagle3"]
    assert (eagle["tokens"], eagle["seconds"], eagle["questions"]) == (15, 1.5, 2)
    assert eagle["tokens_per_s"] == 10
    assert eagle["tau"] == 2.0
    assert (eagle["speedup"], eagle["speedup_ci95"]) == (2.0, [2.0, 2.0])
    assert (eagle["speedup_vs_transformers"], eagle["speedup_vs_transformers_ci95"]) == (4.0, [4.0, 4.0])
    assert eagle["identical"] == 0.0
    assert value["tasks"]["talk"]["vanilla"]["tau"] == 1.0
    assert value["tasks"]["talk"]["transformers"]["identical"] == 1.0
    assert value["time_split_ms"]["eagle3"] == {"target": pytest.approx(200.0), "draft": pytest.approx(100.0)}
    assert value["questions"]["talk"][0]["methods"]["eagle3"]["tokens"] == [5, 5]
    assert value["n_alpha"] == []
    assert (value["backend"], value["same_bits"]) == ("torch", False)


def test_warm_up_is_excluded_and_the_order_rotates() -> None:
    methods, log = clockworks()
    steps: list[BenchProgress] = []
    run_bench(chat_target(), methods, [TALK], BenchSettings(PARAMS, repeats=2), steps.append)
    names = [name for name, _, _ in log]
    assert names[:3] == ["vanilla", "transformers", "eagle3"]  # warm-up
    assert not {tuple(prompt) for _, prompt, _ in log[:3]} & {tuple(prompt) for _, prompt, _ in log[3:]}
    assert names[3:12] == [
        *("vanilla", "transformers", "eagle3"),
        *("transformers", "eagle3", "vanilla"),
        *("eagle3", "vanilla", "transformers"),
    ]
    assert len(names) == 3 + 2 * 9
    assert [step.done for step in steps] == list(range(1, 19))
    assert {step.total for step in steps} == {18}


def test_later_turns_follow_vanillas_answer_for_every_method() -> None:
    methods, log = clockworks()
    run_bench(chat_target(), methods, [TALK], BenchSettings(PARAMS))
    second = {name: prompt for name, prompt, _ in log[6:9]}
    answer = chat_target().tokenizer.decode(list(methods["vanilla"].tokens))
    wanted = prompt_ids(chat_target().tokenizer, TALK.questions[0], [answer])
    assert second == dict.fromkeys(methods, wanted)


def test_every_question_and_repetition_has_its_own_seed_for_all_methods() -> None:
    methods, log = clockworks()
    params = replace(PARAMS, temperature=1.0, seed=7)
    report = run_bench(chat_target(), methods, [TALK], BenchSettings(params, repeats=2))
    seeds = [params.seed for _, _, params in log[3:]]
    assert seeds == [7] * 6 + [1007] * 6 + [8] * 3 + [1008] * 3
    summary = report.tasks[0].methods
    assert summary["transformers"].identical is None  # need not be equal
    assert summary["eagle3"].identical is not None
    assert summary["eagle3"].tokens == 30  # all repetitions


def test_a_question_that_fills_the_context_is_skipped_and_named() -> None:
    methods, _ = clockworks()
    long = Question("long", ("a. " * 300,))
    later = Question("later", ("x", "b. " * 300))
    report = run_bench(chat_target(), methods, [Task("t", (long, later))], BenchSettings(PARAMS))
    assert report.tasks[0].skipped == ("long", "later, turn 2")
    assert report.to_json()["skipped"] == {"t": ["long", "later, turn 2"]}
    assert [row.id for row in report.tasks[0].rows] == ["later"]
    with pytest.raises(TercelError, match="every question of task t fills the context"):
        run_bench(chat_target(), methods, [Task("t", (long,))], BenchSettings(PARAMS))


def test_a_benchmark_needs_vanilla_a_task_and_a_repetition() -> None:
    methods, _ = clockworks()
    with pytest.raises(TercelError, match="needs the method vanilla"):
        run_bench(chat_target(), {"eagle3": methods["eagle3"]}, [TALK], BenchSettings(PARAMS))
    with pytest.raises(TercelError, match="at least one task"):
        run_bench(chat_target(), methods, [], BenchSettings(PARAMS))
    with pytest.raises(TercelError, match="1 to 1,048,576 repetitions, not 0"):
        BenchSettings(PARAMS, repeats=0)


def test_real_methods_give_the_same_tokens() -> None:
    target = chat_target()
    methods = {
        "vanilla": EngineMethod(vanilla(target)),
        "transformers": TransformersMethod(target),
        "eagle3": EngineMethod(Engine(target, OwnTree(target))),
    }
    tasks = [load_task("demo:2", []), TALK]
    short = [Task(task.name, tuple(Question(q.id, (q.turns[0][:40],)) for q in task.questions)) for task in tasks]
    report = run_bench(target, methods, short, BenchSettings(PARAMS))
    assert report.same_bits
    for task in report.tasks:
        assert {name: s.identical.value for name, s in task.methods.items() if s.identical} == dict.fromkeys(
            methods, 1.0
        )
        tau = {name: s.tau.value for name, s in task.methods.items() if s.tau}
        assert tau["vanilla"] == tau["transformers"] == 1.0 < tau["eagle3"]
    assert set(report.time_split_ms) == {"vanilla", "eagle3"}


def test_stock_generation_ends_where_ours_does() -> None:
    target = chat_target()
    prompt = prompt_ids(target.tokenizer, TALK.questions[0])
    free = vanilla(target).generate([_request(prompt, replace(PARAMS, ignore_eos=True, max_new_tokens=8))])[0]
    stop = next(i for i, token in enumerate(free.tokens) if i >= 2 and token not in free.tokens[:i])
    params = replace(PARAMS, ignore_eos=True, stop_token_ids=(free.tokens[stop],))
    assert TransformersMethod(target).run(prompt, params).tokens == free.tokens[: stop + 1]
    penalised = replace(PARAMS, repetition_penalty=1.4, ignore_eos=True)
    ours = EngineMethod(vanilla(target)).run(prompt, penalised)
    theirs = TransformersMethod(target).run(prompt, penalised)
    assert theirs.tokens == ours.tokens
    assert theirs.steps == ours.steps == 11


def test_stock_sampling_repeats_by_seed_and_knows_its_limits() -> None:
    target = chat_target()
    prompt = prompt_ids(target.tokenizer, TALK.questions[0])
    params = replace(PARAMS, temperature=2.0, top_k=30, top_p=0.95, min_p=0.01, seed=4, ignore_eos=True)
    method = TransformersMethod(target)
    first = method.run(prompt, params)
    assert len(first.tokens) == 12
    assert method.run(prompt, params).tokens == first.tokens
    assert method.run(prompt, replace(params, seed=5)).tokens != first.tokens
    with pytest.raises(TercelError, match="presence_penalty"):
        method.run(prompt, replace(PARAMS, presence_penalty=0.5))


def test_table_and_picture(tmp_path: Path) -> None:
    methods, _ = clockworks()
    tasks = [TALK, Task("one", TALK.questions[1:])]
    report = run_bench(chat_target(), methods, tasks, BenchSettings(PARAMS, head="head"))
    report = replace(report, n_alpha=NAlpha((2, 0), (4, 0)))
    assert report.to_json()["n_alpha"] == [0.5, None]
    console = Console(width=160, record=True, quiet=False, file=(tmp_path / "out").open("w"))
    console.print(bench_table(report))
    text = console.export_text()
    assert "head on tiny, float32, cpu, " in text
    (line,) = [line for line in text.splitlines() if "eagle3" in line and "15" in line]
    assert "2.00" in line
    assert "4.00" in line
    assert "0%" in line
    plot_bench([report], tmp_path / "bench.png")
    plot_bench([report], tmp_path / "bench.svg")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in (tmp_path / "bench.svg").read_bytes()
    assert check_picture(Path("-")) == "png"


def _request(prompt: tuple[int, ...], params: SamplingParams):
    return Request(prompt, params)
