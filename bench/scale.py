"""Which trees would be drafted for an 8 B and a 70 B model on a GPU? No GPU is needed: steps are simulated.

    python bench/scale.py [--data-dir DIR] [--questions N] [--json FILE]

Costs are a roofline of public data sheets (see `GPUS` and `MODELS`), acceptance comes from two places: what the shipped
head drafts on the target's own answers, every token's largest tree recorded once; and a made-up head whose first drafts
are accepted as often as the paper's. The policy that sizes the trees is the package's own (docs/scale.md).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from trees import TASKS, Onlooker

from tercel import Engine, Request, SamplingParams, Target, load_draft
from tercel.decode.chances import Chances
from tercel.decode.costs import HeadCosts, LiveCosts, StepCosts
from tercel.decode.draft_tree import DraftTree
from tercel.decode.eagle3 import Eagle3
from tercel.decode.tree_policy import Step, TreePolicy
from tercel.draft.shape import PAPER, WIDEST, TreeShape
from tercel.files import write_json
from tercel.measure.tasks import parse_tasks, prompt_ids

BATCHES, CONTEXT, STEPS = (1, 8, 32, 128), 1024, 1200
CHILDREN, NEVER = WIDEST.top_k, -25.0  # children of a node, and log q of those that are not there
REACHED, MULTIPLIED = 0.8, 0.6  # of a data sheet's bandwidth and peak: what good kernels do
LAUNCH_MS, REDUCE_MS = 0.1, 0.01  # a head's level beside its weights; one all-reduce between GPUs
FIRST = 0.76  # mean of the first child's; the likeliest then has 0.78 (the paper's figures 4 and 7: 0-α .79, 7-α .77)
Path_ = tuple[int, ...]


@dataclass(frozen=True)
class Gpu:
    """GB/s and dense bf16 TFLOP/s of the data sheet."""

    bandwidth: float
    peak: float


GPUS = {"A100 SXM 80 GB": Gpu(2039, 312), "H100 SXM": Gpu(3350, 989)}


@dataclass(frozen=True)
class Model:
    """Billions of weights of the target and of a head's level; KiB of cache a token; GPUs that share it, by tensor
    parallelism, and its layers, each with two all-reduces."""

    weights: float
    head: float
    cache: float
    gpus: int
    layers: int


MODELS = {"8B": Model(8.03, 0.37, 128, 1, 32), "70B": Model(70.6, 1.20, 320, 4, 80)}


def costs_of(gpu: Gpu, model: Model) -> StepCosts:
    """By roofline: weights and cache are read once, every token multiplies every weight."""
    bandwidth, peak = model.gpus * gpu.bandwidth * REACHED, model.gpus * gpu.peak * MULTIPLIED
    reduces = 0.0 if model.gpus == 1 else 2 * model.layers * REDUCE_MS

    def ms(weights: float, tokens: int, beside: float) -> float:
        return max(2e3 * weights / bandwidth, 2 * weights * tokens / peak) + beside

    widths = [1 << power for power in range(14)]
    forward = {1: {n: ms(model.weights, n, reduces) for n in widths}}
    levels = {n: ms(model.head, n, LAUNCH_MS) for n in widths}
    per_token = 1e3 * model.cache * 1024 / 1e9 / bandwidth
    return StepCosts(forward, 0, {1: per_token}, HeadCosts(levels[1] + LAUNCH_MS, levels))


class Position(Protocol):
    """What would be drafted after a token, by the ranks of children on the way, and what turns out right."""

    def log_q(self, node: Path_) -> Sequence[float]: ...
    def right(self) -> Path_: ...


class Recorded:
    """A tree that the head drafted. right: ranks of the accepted path."""

    def __init__(self, tree: DraftTree, log_q: np.ndarray, text: Sequence[int]) -> None:
        self._children: dict[Path_, list[float]] = {}
        self._right: Path_ = ()
        paths: dict[int, Path_] = {0: ()}
        for node in range(len(tree)):
            order = sorted(tree.children(node), key=lambda child: -log_q[child])
            self._children[paths[node]] = [float(log_q[child]) for child in order]
            paths |= {child: (*paths[node], rank) for rank, child in enumerate(order)}
        node: int | None = 0
        for token in text:
            node = tree.child(node, token) if node is not None else None
            if node is None:
                break
            self._right = paths[node]

    def log_q(self, node: Path_) -> Sequence[float]:
        return self._children.get(node, ())

    def right(self) -> Path_:
        return self._right


class MadeUp:
    """A head that means what it says: its first child has a probability of `FIRST` on average, often near 1 as
    real heads have it; the others share the rest, each half of what is left."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._known: dict[Path_, list[float]] = {}
        right: list[int] = []
        while len(right) < WIDEST.depth:
            q = np.exp(self.log_q(tuple(right)))
            rank = int(np.searchsorted(np.cumsum(q), rng.uniform()))
            if rank >= len(q):
                break
            right.append(rank)
        self._right = tuple(right)

    def log_q(self, node: Path_) -> Sequence[float]:
        if node not in self._known:
            first = float(np.clip(self._rng.beta(1.4, 1.4 * (1 / FIRST - 1)), 0.02, 0.999))
            rest = np.sort((1 - first) * 0.5 ** np.arange(1, CHILDREN))[::-1]
            self._known[node] = np.log(np.sort(np.array([first, *rest]))[::-1]).tolist()
        return self._known[node]

    def right(self) -> Path_:
        return self._right


def simulate(costs: StepCosts, players: Sequence[Player], steps: int, context: int = CONTEXT) -> dict[str, float]:
    """Steps of a batch: what the policy chooses and what comes of it. A quarter more of them is not counted, until the
    price has settled."""
    policy, batch = TreePolicy(LiveCosts(costs), Chances(), WIDEST.nodes), len(players)
    totals = dict.fromkeys(("tokens", "ms", "plain", "nodes", "levels"), 0.0)
    for number in range(-steps // 4, steps):
        positions = [player.position() for player in players]
        drafts = policy.begin([False] * batch, context)
        step, accepted = policy.step, [0] * batch
        levels, nodes, ms = 0, 1, float(step.curve[0])
        if drafts:
            paths, levels = _grow(step, positions)
            chances, nodes = step.grown()
            accepted = [_accepted(paths[row], chances[row], nodes, positions[row]) for row in range(batch)]
            spent = policy.costs.draft_ms(batch, step.levels)
            ms = float(step.curve[nodes - 1]) + spent
            gain = (step.worth(chances) - step.price * spent) / batch
            policy.drafted(batch, gain, ms / float(step.curve[0]) - 1)
            _teach(policy.chances, positions, paths, chances, nodes)
        tokens = 1 + sum(accepted) / batch
        policy.ended(tokens, ms / float(step.curve[0]))
        for player, more in zip(players, accepted, strict=True):
            player.advance(more + 1)
        if number >= 0:
            new = {"tokens": tokens, "ms": ms, "plain": float(step.curve[0]), "nodes": nodes, "levels": levels}
            totals = {name: totals[name] + value for name, value in new.items()}
    return _means(totals, steps)


def simulate_fixed(
    costs: StepCosts, players: Sequence[Player], steps: int, shape: TreeShape, context: int = CONTEXT
) -> dict[str, float]:
    """The same with trees of one shape."""
    batch, live = len(players), LiveCosts(costs)
    curve = live.forward_ms(batch, shape.nodes, context)
    levels = (shape.depth - 1) * costs.level_ms(batch * shape.top_k)
    ms, plain = float(curve[-1]) + live.draft_ms(batch, levels), float(curve[0])
    totals = {"tokens": 0.0, "ms": ms * steps, "plain": plain * steps, "nodes": 0.0, "levels": 0.0}
    for _ in range(steps):
        for player in players:
            accepted = _accepted_of(player.position(), shape)
            player.advance(accepted + 1)
            totals["tokens"] += (accepted + 1) / batch
        totals["nodes"] += shape.nodes
        totals["levels"] += shape.depth
    return _means(totals, steps)


def _means(totals: dict[str, float], steps: int) -> dict[str, float]:
    return {
        "nodes": totals["nodes"] / steps,
        "levels": totals["levels"] / steps,
        "tau": totals["tokens"] / steps,
        "speedup": totals["tokens"] / totals["ms"] * totals["plain"] / steps,
    }


def _accepted_of(position: Position, shape: TreeShape) -> int:
    """By a tree of EAGLE-2: the right path, as far as its nodes are among the best, level by level and in all."""
    frontier: list[tuple[float, Path_]] = [(0.0, ())]
    every: list[tuple[float, Path_]] = []
    for _ in range(shape.depth):
        children = [
            (score + log_q, (*node, rank))
            for score, node in frontier
            for rank, log_q in enumerate(position.log_q(node)[: shape.top_k])
        ]
        every += children
        frontier = sorted(children, key=lambda child: -child[0])[: shape.top_k]
    chosen = {node for _, node in sorted(every, key=lambda child: (-child[0], len(child[1])))[: shape.nodes - 1]}
    right, depth = position.right(), 0
    while depth < len(right) and right[: depth + 1] in chosen:
        depth += 1
    return depth


def _teach(
    chances: Chances, positions: Sequence[Position], paths: Sequence[Sequence[Path_]], paths_BM: np.ndarray, nodes: int
) -> None:
    """What the loop learns of its verified trees."""
    for row, position in enumerate(positions):
        chosen = {paths[row][place] for place in np.argsort(-paths_BM[row], kind="stable")[: nodes - 1]}
        right = position.right()
        for depth in range(len(right) + 1):
            children = enumerate(position.log_q(right[:depth]))
            seen = [(rank, q) for rank, q in children if (*right[:depth], rank) in chosen]
            hits = np.array([(*right[:depth], rank) == right[: depth + 1] for rank, _ in seen], bool)
            chances.learn(np.array([q for _, q in seen]), np.full(len(seen), depth + 1), hits, False)
            if not hits.any():
                break


def _grow(step: Step, positions: Sequence[Position]) -> tuple[list[list[Path_]], int]:
    """Paths of all that was proposed, row by row in the policy's order, and how many levels there are."""
    fed: list[list[Path_]] = [[()] for _ in positions]
    paths: list[list[Path_]] = [[] for _ in positions]
    for depth in range(1, WIDEST.depth + 1):
        said = np.full((len(positions), len(fed[0]), CHILDREN), NEVER)
        for row, position in enumerate(positions):
            for place, node in enumerate(fed[row]):
                known = position.log_q(node)[:CHILDREN]
                said[row, place, : len(known)] = known
            paths[row] += [(*node, rank) for node in fed[row] for rank in range(CHILDREN)]
        chosen = step.grow(said, depth, 0 if depth == WIDEST.depth else WIDEST.nodes // 4)
        if chosen is None:
            return paths, depth
        newest = [row[-said.shape[1] * CHILDREN :] for row in paths]
        fed = [[newest[row][place] for place in chosen[row]] for row in range(len(positions))]
    return paths, WIDEST.depth


def _accepted(paths: Sequence[Path_], chances: np.ndarray, nodes: int, position: Position) -> int:
    chosen = {paths[place] for place in np.argsort(-chances, kind="stable")[: nodes - 1]}
    right, depth = position.right(), 0
    while depth < len(right) and right[: depth + 1] in chosen:
        depth += 1
    return depth


def record(asked: argparse.Namespace) -> list[list[Recorded]]:
    """By answer, what the shipped head drafts at every token of what the target says."""
    target = Target.load("smollm2-135m")
    head = load_draft("smollm2-135m", target)
    names = ",".join(f"{name}:{asked.questions}" for name in TASKS) if asked.data_dir else f"demo:{5 * asked.questions}"
    answers = []
    for task in parse_tasks(names, [Path(folder) for folder in asked.data_dir]):
        for question in task.questions:
            prompt = prompt_ids(target.tokenizer, question)
            onlooker = Onlooker(Eagle3(head, target, WIDEST))
            params = SamplingParams(max_new_tokens=asked.max_new_tokens)
            text = Engine(target, onlooker).generate([Request(prompt, params)])[0].tokens
            kept = [(draft, text[length - len(prompt) :]) for length, draft in onlooker.drafts]
            answers.append([Recorded(d.tree, d.log_q, rest) for d, rest in kept if d.log_q is not None])
            print(f"{task.name} {question.id}: {len(text)} tokens", flush=True)
    return answers


class Player:
    """Goes through one answer after the other, in an order of its own, or through made-up positions without an end."""

    def __init__(self, answers: Sequence[Sequence[Position]], seed: int) -> None:
        self._answers, self._rng = [answer for answer in answers if answer], np.random.default_rng(seed)
        self._answer: Sequence[Position] = ()
        self._at = 0

    def position(self) -> Position:
        if not self._answers:
            return MadeUp(self._rng)
        while self._at >= len(self._answer):
            self._at, self._answer = 0, self._answers[int(self._rng.integers(len(self._answers)))]
        return self._answer[self._at]

    def advance(self, tokens: int) -> None:
        self._at += tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", action="append", default=[], help="where the evaluation sets lie")
    parser.add_argument("--questions", type=int, default=3, help="of a task")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--json", help="write the result there")
    asked = parser.parse_args()
    answers = record(asked)
    sources: dict[str, Sequence[Sequence[Position]]] = {"shipped head": answers, "paper's α": ()}
    rows: list[dict[str, Any]] = []
    print("| acceptance | model | GPU | batch | nodes | levels | τ | over no drafts | 10x8x60: τ | over no drafts |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for source, known in sources.items():
        for model in MODELS:
            for gpu in GPUS:
                for batch in BATCHES:
                    costs, steps = costs_of(GPUS[gpu], MODELS[model]), max(60, STEPS // batch)
                    players = [Player(known, seed) for seed in range(batch)]
                    auto = simulate(costs, players, steps)
                    paper = simulate_fixed(costs, [Player(known, seed) for seed in range(batch)], steps, PAPER)
                    found = {**auto, "paper_tau": paper["tau"], "paper_speedup": paper["speedup"]}
                    rows.append({"acceptance": source, "model": model, "gpu": gpu, "batch": batch, **found})
                    numbers = " | ".join(f"{value:.2f}" for value in found.values())
                    device = gpu if MODELS[model].gpus == 1 else f"{MODELS[model].gpus} × {gpu}"
                    print(f"| {source} | {model} | {device} | {batch} | {numbers} |", flush=True)
    if asked.json:
        write_json(Path(asked.json), {"rows": rows})


if __name__ == "__main__":
    main()
