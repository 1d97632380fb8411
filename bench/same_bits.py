"""Are drafted texts those of token-by-token decoding, and what does that cost? (docs/exactness.md)

    python bench/same_bits.py [TARGET] [HEAD] [--data-dir DIR] [--quick] [--json FILE]

Looks at how many rows the target's matrix products give the bits of a row that comes with 63 others. Then the target's
forwards are timed in turn, of one token and of a tree of ten nodes behind contexts of several lengths: as it is loaded,
so that a token has the same bits in every block, over the same weights as stock kernels run them. Last, every question
is answered four times in turn, with and without drafts, in both ways: counts the texts that drafts leave as they are,
at temperature 0 and 1, and compares whole steps. Ratios have 95 % intervals, over rounds and over questions.
Without DIR the built-in demo questions are asked; with --questions 0 none. Run it with nothing beside it; only the
counts do not mind.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tercel import Engine, Request, SamplingParams, Target, TreeShape, load_draft, make_proposer
from tercel.decode.pieces import Context
from tercel.decode.stopwatch import Patience, time_in_turn
from tercel.decode.types import GenerationResult
from tercel.files import write_json
from tercel.measure.intervals import median, ratio_of_totals, speedup
from tercel.measure.tasks import Prompt, Task, first_prompts, parse_tasks

TASKS = ("mt_bench", "humaneval", "gsm8k", "alpaca", "cnn_dm")
MODES = {"same_bits": True, "stock": False}
METHODS = ("vanilla", "eagle3")
QUICK = (3, 48)  # questions a task, tokens an answer
ROWS = (1, 2, 3, *range(4, 65, 4))
CONTEXTS = (112, 304, 944)  # from the border to the block there are as many keys as in the mean
TREE = (-1, 0, 0, 0, 1, 1, 2, 4, 4, 5)  # every node's parent


@dataclass
class Steps:
    """What one method in one mode took, a number a question."""

    seconds: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)

    def add(self, result: GenerationResult) -> None:
        if result.steps:
            self.seconds.append(result.decode_seconds)
            self.steps.append(result.steps)


class Comparison:
    """Engines of both modes over one set of weights in memory each, and what was found with them."""

    def __init__(self, target: str, head: str | None, dtype: torch.dtype, shape: TreeShape | None) -> None:
        self.targets = {mode: Target.load(target, dtype=dtype, same_bits=same) for mode, same in MODES.items()}
        model = load_draft(head, self.targets["same_bits"])
        self.engines = {
            (mode, method): Engine(loaded, make_proposer(method, loaded, head=model, shape=shape))
            for mode, loaded in self.targets.items()
            for method in METHODS
        }
        self.taken = {key: Steps() for key in self.engines}
        self._turn = 0

    def ask(self, prompt: Prompt, params: SamplingParams) -> dict[str, bool]:
        """Whether drafts left the text as it is, by mode."""
        keys = list(self.engines)
        first = self._turn % len(keys)
        self._turn += 1
        results = {}
        for key in keys[first:] + keys[:first]:
            results[key] = self.engines[key].generate([Request(prompt.tokens, params)])[0]
        if all(result.steps for result in results.values()):
            for key, result in results.items():
                self.taken[key].add(result)
        return {mode: results[mode, "eagle3"].tokens == results[mode, "vanilla"].tokens for mode in MODES}

    def step_ratio(self, method: str) -> dict[str, object]:
        """Time of a step that gives the same bits over one of stock attention."""
        ours, stock = (self.taken[mode, method] for mode in MODES)
        ratio = speedup(ours.seconds, ours.steps, stock.seconds, stock.steps)
        return {"ratio": ratio.value, "ci95": ratio.ci95}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", default="smollm2-135m")
    parser.add_argument("head", nargs="?")
    parser.add_argument("--data-dir", type=Path, help="folder of the five evaluation sets")
    parser.add_argument("--questions", type=int, default=20, help="of every task")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--tree", metavar="KxDxN", help="top-k, depth and nodes; by default the usual tree")
    parser.add_argument("--seconds", type=float, default=120.0, help="for timing forwards")
    parser.add_argument("--quick", action="store_true", help="{} questions a task, {} tokens".format(*QUICK))
    parser.add_argument("--json", type=Path, help="file for the result")
    asked = parser.parse_args()
    count, length = QUICK if asked.quick else (asked.questions, asked.max_new_tokens)
    shape = TreeShape(*map(int, asked.tree.split("x"))) if asked.tree else None
    comparison = Comparison(asked.target, asked.head, getattr(torch, asked.dtype), shape)
    products = differing_rows(comparison.targets["same_bits"])
    for size, counts in products.items():
        print(f"a product of {size}: other bits at {counts or 'no number of'} rows")
    forwards = time_forwards(comparison.targets, asked.seconds)
    names = TASKS if asked.data_dir else ("demo",)
    asking = ",".join(f"{name}:{count}" for name in names)
    tasks = parse_tasks(asking, [asked.data_dir] if asked.data_dir else []) if count else []
    texts = [count_texts(comparison, tasks, temperature, length) for temperature in asked.temperatures]
    result = {
        "target": asked.target,
        "dtype": asked.dtype,
        "threads": torch.get_num_threads(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "max_new_tokens": length,
        "products": products,
        "forwards": forwards,
        "texts": texts,
        "step": {method: comparison.step_ratio(method) for method in METHODS} if tasks else {},
    }
    for method, step in result["step"].items():
        print(f"{method}: a step takes {step['ratio']:.3f} of stock attention's, 95 % {step['ci95']}")
    if asked.json:
        write_json(asked.json, result)


def time_forwards(targets: Mapping[str, Target], seconds: float) -> list[dict[str, object]]:
    """The output layer included; a ratio is that of totals over rounds."""
    works: dict[tuple[str, int, str], Callable[[], object]] = {}
    for length in CONTEXTS:
        for mode, target in targets.items():
            context = Context(target, length, len(TREE), lambda tokens: None)
            for name, parents in (("one token", TREE[:1]), ("tree of ten", TREE)):
                works[name, length, mode] = block_after(context, parents)
    patience = Patience(seconds, least=20, most=10_000)
    taken = time_in_turn(works, torch.device("cpu"), patience, lambda done, most: None)
    found = []
    for name, length in dict.fromkeys(key[:2] for key in works):
        ours, stock = (taken[name, length, mode] for mode in MODES)
        ratio = ratio_of_totals(ours, stock)
        found.append(
            {
                "block": name,
                "context": length,
                "rounds": len(ours),
                "ratio": ratio.value,
                "ci95": ratio.ci95,
                "ms": {"same_bits": median(ours).value, "stock": median(stock).value},
            }
        )
        ms = f"{median(ours).value:.1f} ms, stock {median(stock).value:.1f} ms"
        print(f"{name} behind {length}: {ms}; {ratio.value:.3f} of it, 95 % {ratio.ci95}", flush=True)
    return found


def block_after(context: Context, parents: Sequence[int]) -> Callable[[], object]:
    """A draft tree's forward and its output layer."""
    target, nodes = context.target, len(parents)
    seen, depths = torch.eye(nodes, dtype=torch.bool), torch.zeros(nodes, dtype=torch.long)
    for node, parent in enumerate(parents[1:], 1):
        seen[node] |= seen[parent]
        depths[node] = depths[parent] + 1
    tokens = torch.tensor([context.tokens[context.length : context.length + nodes]])
    positions = (context.length + depths)[None]
    return lambda: target.logits(target.forward(tokens, positions, context.cache, seen[None]).hidden)


@torch.no_grad()
def differing_rows(target: Target) -> dict[str, list[int]]:
    """For every size of a linear layer, at which numbers of rows (of `ROWS`) its bits are others than at 64."""
    layers = [layer for layer in target.model.modules() if isinstance(layer, torch.nn.Linear)]
    sizes = {f"{layer.in_features}x{layer.out_features}": layer for layer in layers}
    found = {}
    for size, layer in sizes.items():
        rows = torch.randn(64, layer.in_features, generator=torch.Generator().manual_seed(0)).to(target.dtype)
        whole = layer(rows)
        found[size] = []
        for count in ROWS:
            used = 64 // count * count
            parts = torch.cat([layer(part) for part in rows[:used].split(count)])
            if not torch.equal(parts, whole[:used]):
                found[size].append(count)
    return found


def count_texts(comparison: Comparison, tasks: Sequence[Task], temperature: float, length: int) -> dict[str, object]:
    """Identical texts of every task by mode, as `[identical, asked]`."""
    found: dict[str, dict[str, list[int]]] = {mode: {} for mode in MODES}
    target = comparison.targets["same_bits"]
    for task in tasks:
        prompts = [p for p in first_prompts(target.tokenizer, [task]) if len(p.tokens) < target.context_length]
        same = [
            comparison.ask(prompt, SamplingParams(temperature, max_new_tokens=length, seed=seed))
            for seed, prompt in enumerate(prompts)
        ]
        for mode in MODES:
            found[mode][task.name] = [sum(row[mode] for row in same), len(same)]
        line = ", ".join(f"{mode} {found[mode][task.name][0]}" for mode in MODES)
        print(f"T={temperature:g} {task.name}: identical of {len(same)}: {line}", flush=True)
    return {"temperature": temperature, "identical": found}


if __name__ == "__main__":
    main()
