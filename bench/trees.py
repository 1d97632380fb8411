"""Trees as large as pays, beside trees of one shape: the paper's, others, and the best that any choice could do.

    python bench/trees.py [TARGET] [HEAD] [--data-dir DIR] [--backend NAME] [--quick] [--json FILE] [--plot FILE.png]

Every question is answered by every method in turn, at temperature 0 and 1. `best fixed` is the fastest of the fixed
trees on the very questions that are counted, which flatters it. `oracle` is no run: every answer is gone through once
token by token, with the largest tree drafted at each; knowing what will be accepted, the fewest milliseconds by the
table of costs are found for it. No choice among what the head proposes could be faster.

The replay also says how far the head's probabilities are from the truth, before and after what is learned of them on
the other half of the questions: the expected calibration error, and with --plot the picture.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tercel import Engine, Request, SamplingParams, Target, load_draft, load_target, make_proposer
from tercel.decode.chances import Chances, expected_calibration_error
from tercel.decode.cost_aware import CostAware
from tercel.decode.costs import StepCosts
from tercel.decode.eagle3 import Eagle3
from tercel.decode.proposer import PassingOn, Proposer, Row
from tercel.decode.types import Proposal
from tercel.decode.vanilla import Vanilla
from tercel.draft import DraftModel
from tercel.draft.shape import WIDEST, parse_shape
from tercel.files import write_json
from tercel.measure.intervals import Interval, ratio_of_totals, speedup
from tercel.measure.tasks import Task, parse_tasks, prompt_ids
from tercel.target_model.backend_names import AUTO as AUTO_BACKEND
from tercel.target_model.backend_names import BACKENDS

PAPER = "10x8x60"
GRID = ("chain:1", "chain:2", "chain:4", "2x2x4", "4x2x6", "4x3x8", "6x3x10", "8x4x16", "10x6x32", PAPER)
QUICK_GRID = ("chain:2", "2x2x4", "6x3x10", "8x4x16", PAPER)
TASKS = ("mt_bench", "humaneval", "gsm8k", "alpaca", "cnn_dm")
VANILLA, AUTO = "vanilla", "auto"


@dataclass
class Runs:
    """Of one method in one task, a question after the other."""

    tokens: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    nodes: list[float] = field(default_factory=list)
    texts: list[tuple[int, ...]] = field(default_factory=list)

    def add(self, other: Runs) -> None:
        for name in ("tokens", "seconds", "steps", "nodes", "texts"):
            getattr(self, name).extend(getattr(other, name))


@dataclass
class Outcome:
    """Drafted nodes whose parents were right: log q, depth, and whether they were, `[n]` each; and at every token of an
    answer how many of those after it the largest tree holds in a row."""

    log_q: list[float] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    hits: list[bool] = field(default_factory=list)
    ahead: list[int] = field(default_factory=list)


class Onlooker(PassingOn):
    """Drafts at every token and has none of it verified."""

    def __init__(self, inner: Proposer) -> None:
        super().__init__(inner)
        self.drafts: list[tuple[int, Proposal]] = []  # tokens before, draft

    def propose(self, rows: Sequence[Row]) -> list[Proposal]:
        self.drafts += zip((len(row.tokens) for row in rows), super().propose(rows), strict=True)
        return Vanilla().propose(rows)


def main() -> None:
    asked = _arguments()
    target = load_target(asked.target, dtype=torch.bfloat16, backend=asked.backend)
    target.expect_many()
    head = load_draft(asked.head, target)
    auto = make_proposer("eagle3", target, head=head)
    assert isinstance(auto, CostAware)
    costs = auto.policy.costs.table
    proposers: dict[str, Proposer] = {VANILLA: Vanilla(), AUTO: auto}
    for name in QUICK_GRID if asked.quick else GRID:
        proposers[name] = make_proposer("eagle3", target, head=head, shape=parse_shape(name))
    count, new = (3, 64) if asked.quick else (asked.questions, asked.max_new_tokens)
    names = ",".join(f"{name}:{count}" for name in TASKS) if asked.data_dir else f"demo:{3 * count}"
    tasks = parse_tasks(names, [Path(folder) for folder in asked.data_dir])
    result: dict[str, Any] = {
        "target": asked.target,
        "backend": target.backend,
        "costs": costs.to_json(),
        "temperatures": {},
    }
    reliability: dict[float, tuple[Outcome, Outcome]] = {}
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, max_new_tokens=new, seed=0)
        runs = {task.name: _answer_all(target, proposers, task, params) for task in tasks}
        replays = {task.name: _replay(target, head, task, params, runs[task.name][VANILLA]) for task in tasks}
        result["temperatures"][f"{temperature:g}"] = _table(runs, replays, costs, temperature)
        every = [outcome for outcomes in replays.values() for outcome in outcomes]
        reliability[temperature] = _joined(every[::2]), _joined(every[1::2])
        result["temperatures"][f"{temperature:g}"]["calibration"] = _calibration(*reliability[temperature], temperature)
        print(result["temperatures"][f"{temperature:g}"]["calibration"])
    if asked.json:
        write_json(Path(asked.json), result)
    if asked.plot:
        _plot(reliability, Path(asked.plot))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", default="smollm2-135m")
    parser.add_argument("head", nargs="?", default=None)
    parser.add_argument("--data-dir", action="append", default=[], help="where the evaluation sets lie")
    parser.add_argument("--questions", type=int, default=5, help="of a task")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--backend", choices=BACKENDS, default=AUTO_BACKEND, help="what computes the target")
    parser.add_argument("--quick", action="store_true", help="three questions a task, 64 tokens, few fixed trees")
    parser.add_argument("--json", help="write the result there")
    parser.add_argument("--plot", help="draw reliability there")
    return parser.parse_args()


def _answer_all(target: Target, proposers: dict[str, Proposer], task: Task, params: SamplingParams) -> dict[str, Runs]:
    """Every question by every method, the first of them another each time; after a short one that does not count."""
    runs, names = {name: Runs() for name in proposers}, list(proposers)
    for number, question in enumerate([task.questions[0], *task.questions]):
        prompt = prompt_ids(target.tokenizer, question)
        few = SamplingParams(max_new_tokens=8) if not number else params
        for name in names[number % len(names) :] + names[: number % len(names)]:
            answer = Engine(target, proposers[name]).generate([Request(prompt, few)])[0]
            if number and answer.steps:
                numbers = [len(answer.tokens) - 1.0], [answer.decode_seconds], [float(answer.steps)]
                runs[name].add(Runs(*numbers, [float(answer.nodes)], [answer.tokens]))
                print(f"{task.name} {question.id} {name}: {numbers[0][0] / numbers[1][0]:.1f} tokens/s", flush=True)
    return runs


def _replay(target: Target, head: DraftModel, task: Task, params: SamplingParams, known: Runs) -> list[Outcome]:
    """What the largest tree would have held at every token of every answer."""
    outcomes = []
    for question in task.questions[: len(known.texts)]:
        prompt = prompt_ids(target.tokenizer, question)
        onlooker = Onlooker(Eagle3(head, target, WIDEST))
        text = Engine(target, onlooker).generate([Request(prompt, params)])[0].tokens
        outcomes.append(Outcome())
        for length, draft in onlooker.drafts:
            _compare(draft, text[length - len(prompt) :], outcomes[-1])
    return outcomes


def _compare(draft: Proposal, text: Sequence[int], outcome: Outcome) -> None:
    assert draft.log_q is not None
    tree, node, ahead = draft.tree, 0, 0
    for token in text:
        right = tree.child(node, token)
        for child in tree.children(node):
            outcome.log_q.append(float(draft.log_q[child]))
            outcome.depths.append(ahead + 1)
            outcome.hits.append(child == right)
        if right is None:
            break
        node, ahead = right, ahead + 1
    outcome.ahead.append(ahead)


def _oracle_ms(ahead: Sequence[int], costs: StepCosts, context: int) -> tuple[float, float]:
    """The fewest milliseconds for an answer, and those without drafts: from its end on, what is left takes the least
    over how many of the right tokens are drafted."""
    most = max(ahead, default=0) + 1
    forward = costs.forward_ms(1, np.arange(1.0, most + 1), context)
    keep_up = 0.0 if costs.head is None else costs.head.keep_up
    left = [0.0] * (len(ahead) + 1)
    for place in reversed(range(len(ahead))):
        left[place] = left[place + 1] + float(forward[0])
        for drafted in range(1, min(ahead[place], len(ahead) - 1 - place) + 1):
            spent = float(forward[drafted]) + keep_up + costs.level_ms(1) * (drafted - 1)
            left[place] = min(left[place], spent + left[place + drafted + 1])
    return left[0], float(forward[0]) * len(ahead)


def _table(
    runs: dict[str, dict[str, Runs]], replays: dict[str, list[Outcome]], costs: StepCosts, temperature: float
) -> dict[str, Any]:
    everything: dict[str, Runs] = {}
    for task in runs.values():
        for name, some in task.items():
            everything.setdefault(name, Runs()).add(some)
    fixed = [name for name in everything if name not in (VANILLA, AUTO)]
    best = max(fixed, key=lambda name: sum(everything[name].tokens) / sum(everything[name].seconds))
    shown = [VANILLA, PAPER, best, AUTO]
    table: dict[str, Any] = {"best_fixed": best, "tasks": {}}
    print(f"\ntemperature {temperature:g}: over vanilla [95 %], τ, nodes a step")
    together = {**runs, "all": everything}
    outcomes = {**replays, "all": [outcome for some in replays.values() for outcome in some]}
    for name, task in together.items():
        rows = {method: _row(task[method], task[VANILLA]) for method in task}
        times = [_oracle_ms(outcome.ahead, costs, 256) for outcome in outcomes[name]]
        oracle = sum(plain for _, plain in times) / max(sum(least for least, _ in times), 1e-9)
        against = _speedup(task[AUTO], task[best])
        table["tasks"][name] = {"methods": rows, "oracle": oracle, "auto_over_best_fixed": _as_json(against)}
        line = "  ".join(
            f"{method} {_told(rows[method]['over_vanilla'])} τ {rows[method]['tau']:.2f} n {rows[method]['nodes']:.1f}"
            for method in dict.fromkeys(shown)
        )
        print(f"{name}: {line}  oracle {oracle:.2f}  auto over {best} {against.value:.3f}", flush=True)
    return table


def _row(runs: Runs, plain: Runs) -> dict[str, Any]:
    steps = sum(runs.steps)
    return {
        "tokens_per_s": _as_json(ratio_of_totals(runs.tokens, runs.seconds)),
        "over_vanilla": _as_json(_speedup(runs, plain)),
        "tau": sum(runs.tokens) / steps,
        "nodes": sum(runs.nodes) / steps,
        "identical": sum(a == b for a, b in zip(runs.texts, plain.texts, strict=True)) / len(runs.texts),
    }


def _speedup(runs: Runs, base: Runs) -> Interval:
    return speedup(runs.tokens, runs.seconds, base.tokens, base.seconds)


def _as_json(interval: Interval) -> dict[str, Any]:
    return {"value": interval.value, "ci95": interval.ci95}


def _told(value: dict[str, Any]) -> str:
    spread = "" if value["ci95"] is None else " [{:.2f}, {:.2f}]".format(*value["ci95"])
    return f"{value['value']:.2f}{spread}"


def _joined(outcomes: Sequence[Outcome]) -> Outcome:
    together = Outcome()
    for outcome in outcomes:
        for name in ("log_q", "depths", "hits", "ahead"):
            getattr(together, name).extend(getattr(outcome, name))
    return together


def _learned(outcome: Outcome, temperature: float) -> Chances:
    chances = Chances()
    chances.learn(np.array(outcome.log_q), np.array(outcome.depths, int), np.array(outcome.hits, bool), temperature > 0)
    return chances


def _said(outcome: Outcome, chances: Chances, temperature: float) -> np.ndarray:
    log_q, depths = np.array(outcome.log_q), np.array(outcome.depths)
    said = np.zeros(len(log_q))
    for depth in np.unique(depths):
        said[depths == depth] = chances.of(log_q[depths == depth], int(depth), temperature > 0)
    return said


def _calibration(one: Outcome, other: Outcome, temperature: float) -> dict[str, float]:
    """Of each half by what the other taught."""
    halves = [(one, other), (other, one)] if other.hits else [(one, one)]
    hits = np.concatenate([np.array(tested.hits, float) for tested, _ in halves])
    raw = np.concatenate([np.exp(tested.log_q) for tested, _ in halves])
    fit = np.concatenate([_said(tested, _learned(taught, temperature), temperature) for tested, taught in halves])
    return {
        "outcomes": len(hits),
        "ece_before": expected_calibration_error(raw, hits),
        "ece_after": expected_calibration_error(fit, hits),
    }


def _plot(reliability: dict[float, tuple[Outcome, Outcome]], file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, (temperature, (one, other)) in zip(axes, reliability.items(), strict=True):
        fit = _said(other, _learned(one, temperature), temperature)
        for said, name in ((np.exp(other.log_q), "the head's own"), (fit, "learned on other questions")):
            bins = np.minimum((said * 10).astype(int), 9)
            hits = np.array(other.hits, float)
            drawn = [b for b in range(10) if (bins == b).sum() >= 10]
            points = [(said[bins == b].mean(), hits[bins == b].mean()) for b in drawn]
            axis.plot(*zip(*points, strict=True), "o-", label=name)
        axis.plot([0, 1], [0, 1], color="grey", linewidth=0.8)
        axis.set(title=f"temperature {temperature:g}", xlabel="probability", ylabel="accepted")
        axis.legend()
    figure.savefig(file)


if __name__ == "__main__":
    main()
