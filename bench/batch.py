"""Tokens a second of all requests together, against how many are decoded at a time, beside token-by-token decoding of
the same batch (paper, table 3).

    python bench/batch.py [TARGET] [HEAD] [--heads FILE] [--data-dir DIR] [--quick] [--json FILE] [--check]

A batch is in a steady state: whoever ends is followed by the next question, whose prompt is run while the others wait,
and the first requests are short by unlike amounts, so that rows end one after another from the beginning. All methods
have a loop of their own over the same questions and take turns, for a window of as many tokens each; such a round of
windows is what intervals resample. Methods are vanilla and eagle3; --heads adds those of a manifest (as of `tercel
bench`), each also compared with the one before it. --check compares every text with that of the question asked alone,
in float32, instead of timing anything.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count, pairwise, zip_longest
from pathlib import Path
from typing import Any

import torch

from tercel import Engine, Request, Target, load_draft, make_proposer, sampling_for
from tercel.decode.loop import DecodingLoop
from tercel.decode.proposer import Proposer
from tercel.decode.proposers import EAGLE3, VANILLA
from tercel.draft.shape import SIZED, parse_shape
from tercel.files import write_json
from tercel.measure.intervals import Interval, ratio_of_totals, speedup
from tercel.measure.machine import describe, versions
from tercel.measure.manifest import Entry, read_manifest
from tercel.measure.tasks import first_prompts, parse_tasks
from tercel.target_model.backend_names import AUTO, BACKENDS
from tercel.target_model.backends import with_backend
from tercel.target_model.protocol import TargetModel

BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 56, 64)
FIVE = "mt_bench,humaneval,gsm8k,alpaca,cnn_dm"
METHODS = (VANILLA, EAGLE3)


@dataclass(frozen=True)
class Plan:
    """pairs: windows of each method; window, row_window: tokens of a window, for the batch and for each of its rows;
    new: most tokens of an answer."""

    pairs: int
    window: int
    row_window: int
    new: int

    def tokens(self, rows: int) -> int:
        return self.window + rows * self.row_window


FULL, QUICK = Plan(pairs=20, window=64, row_window=16, new=128), Plan(pairs=6, window=24, row_window=5, new=64)


class Stream:
    """A loop that never runs out of requests."""

    def __init__(
        self, target: TargetModel, proposer: Proposer, prompts: Sequence[tuple[int, ...]], slots: int, new: int
    ) -> None:
        self._loop, self._slots = DecodingLoop(target, proposer, slots), slots
        self._target, self._prompts, self._new = target, prompts, new
        self._numbers = count()
        for row in range(slots):
            self._submit(math.ceil(new * (row + 1) / slots))
        self._loop.step()

    def _submit(self, new: int) -> None:
        prompt = self._prompts[next(self._numbers) % len(self._prompts)]
        self._loop.submit(Request(prompt, sampling_for(self._target, max_new_tokens=new)))

    def window(self, tokens: int) -> tuple[int, float]:
        """Run on until so many tokens came; returns how many it was, and the seconds."""
        done, started = 0, time.perf_counter()
        while done < tokens:
            while self._loop.pending < self._slots:
                self._submit(self._new)
            events = self._loop.step()
            done += sum(len(event.emission.tokens) for event in events)
            for event in events:
                if event.result is not None:
                    event.result.require()
        return done, time.perf_counter() - started


@dataclass(frozen=True)
class Throughput:
    """Windows of each method: tokens and seconds."""

    windows: dict[str, list[tuple[int, float]]]

    def tokens_per_s(self, method: str) -> Interval:
        tokens, seconds = zip(*self.windows[method], strict=True)
        return ratio_of_totals(tokens, seconds)

    def ratio(self, method: str = EAGLE3, base: str = VANILLA) -> Interval:
        columns = [column for name in (method, base) for column in zip(*self.windows[name], strict=True)]
        return speedup(*columns)

    def ratios(self) -> dict[str, Interval]:
        """Of every method over token-by-token decoding, and of each over the one before it."""
        drafting = [method for method in self.windows if method != VANILLA]
        found = {method: self.ratio(method) for method in drafting}
        return found | {f"{after} over {before}": self.ratio(after, before) for before, after in pairwise(drafting)}

    def to_json(self) -> dict[str, Any]:
        ratio = self.ratio()
        return {
            **{method: self.tokens_per_s(method).value for method in self.windows},
            "ratio": ratio.value,
            "ci95": ratio.ci95,
            **{f"{method}_ci95": self.tokens_per_s(method).ci95 for method in self.windows},
            "ratios": {name: {"ratio": own.value, "ci95": own.ci95} for name, own in self.ratios().items()},
        }


def measure(
    target: TargetModel,
    make: Callable[[str], Proposer],
    prompts: Sequence[tuple[int, ...]],
    rows: int,
    plan: Plan,
    methods: Sequence[str] = METHODS,
) -> Throughput:
    """Throughput of all methods with `rows` requests at a time."""
    streams = {method: Stream(target, make(method), prompts, rows, plan.new) for method in methods}
    windows: dict[str, list[tuple[int, float]]] = {method: [] for method in methods}
    for stream in streams.values():
        stream.window(plan.tokens(rows))  # not counted: whether drafting pays is found out
    for pair in range(plan.pairs):
        for method in methods[:: 1 if pair % 2 else -1]:
            windows[method].append(streams[method].window(plan.tokens(rows)))
    return Throughput(windows)


def differing(
    target: TargetModel,
    make: Callable[[str], Proposer],
    prompts: Sequence[tuple[int, ...]],
    rows: int,
    new: int,
    methods: Sequence[str] = METHODS,
) -> int:
    """How many texts of a batch are not those of the same questions asked one by one, without drafts."""
    asked = [
        Request(prompt, sampling_for(target, max_new_tokens=math.ceil(new * (1 + i % 3) / 3)))
        for i, prompt in enumerate(prompts[: rows + max(2, rows // 4)])
    ]
    alone = [result.tokens for result in Engine(target, make(VANILLA)).generate(asked)]
    together = [Engine(target, make(m), slots=rows, prefill_chunk=128).generate(asked) for m in methods]
    return sum(result.tokens != own for results in together for result, own in zip(results, alone, strict=True))


def questions(target: Target, spec: str, folders: Sequence[Path], longest: int) -> list[tuple[int, ...]]:
    """First turns of all tasks, a task after another in turn, so that any part of them is a mixture."""
    each = [first_prompts(target.tokenizer, [task]) for task in parse_tasks(spec, folders)]
    mixed = chain.from_iterable(zip_longest(*each))
    return [prompt.tokens for prompt in mixed if prompt is not None and len(prompt.tokens) <= longest]


def table(found: dict[int, Throughput]) -> Iterator[str]:
    yield "batch  tok/s, ratios"
    for rows, seen in found.items():
        rates = [f"{method} {seen.tokens_per_s(method).value:.1f}" for method in seen.windows]
        ratios = [f"{name} {own.value:.2f} [{own.low:.2f}, {own.high:.2f}]" for name, own in seen.ratios().items()]
        yield f"{rows:>5}  {', '.join(rates)}; {', '.join(ratios)}"


def main() -> int:
    asked = _arguments()
    plan = QUICK if asked.quick else FULL
    plan = plan if asked.max_new_tokens is None else replace(plan, new=asked.max_new_tokens)
    dtype = torch.float32 if asked.check else torch.bfloat16
    target = with_backend(Target.load(asked.target, dtype=dtype), asked.backend, say=print)
    target.expect_many()
    entries = {VANILLA: Entry(VANILLA), EAGLE3: Entry(EAGLE3, asked.head)}
    entries |= read_manifest(asked.heads) if asked.heads else {}
    heads = {name: load_draft(entry.head, target) for name, entry in entries.items() if name != VANILLA}

    def make(name: str) -> Proposer:
        entry = entries[name]
        shape = parse_shape(entry.tree) if entry.tree else asked.tree
        return make_proposer(entry.method, target, head=heads.get(name), shape=shape, slots=max(asked.batches))

    folders = [asked.data_dir] if asked.data_dir else []
    spec = asked.tasks or (FIVE if folders else "demo")
    prompts = questions(target, spec, folders, asked.longest_prompt)
    report: dict[str, Any] = {
        "target": asked.target,
        "heads": {name: entry.head for name, entry in entries.items() if name != VANILLA},
        "tree": str(asked.tree or SIZED),
        "tasks": spec,
        "backend": target.backend,
        "dtype": str(target.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "machine": describe(target.device),
        "versions": versions(),
        "plan": vars(plan),
    }
    if asked.check:
        wrong = {rows: differing(target, make, prompts, rows, plan.new, tuple(entries)) for rows in asked.batches}
        print("\n".join(f"{rows:>5} at a time: {n} texts differ" for rows, n in wrong.items()))
        report["differing"] = {str(rows): n for rows, n in wrong.items()}
    else:
        found: dict[int, Throughput] = {}
        for rows in asked.batches:
            found[rows] = measure(target, make, prompts, rows, plan, tuple(entries))
            print(list(table({rows: found[rows]}))[1], flush=True)
        print("\n" + "\n".join(table(found)))
        report["batch"] = {str(rows): seen.to_json() for rows, seen in found.items()}
    if asked.json:
        write_json(asked.json, report)
    return int(any(report.get("differing", {}).values()))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", default="smollm2-135m")
    parser.add_argument("head", nargs="?", help="by default the one that is shipped for the target")
    parser.add_argument("--heads", type=Path, help="a manifest of further methods, as of `tercel bench`")
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--data-dir", type=Path, help="of the evaluation sets; without, demo questions are asked")
    parser.add_argument("--tasks", help=f"as in `tercel bench`; {FIVE}, or demo")
    parser.add_argument("--longest-prompt", type=int, default=1024, help="longer prompts are left out")
    parser.add_argument("--tree", type=parse_shape, help="as in `tercel bench`; by default as large as pays")
    parser.add_argument("--max-new-tokens", type=int)
    parser.add_argument("--backend", choices=BACKENDS, default=AUTO, help="what computes the target")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter windows")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
