"""τ against training data and training budget: the same recipe in many sizes, and the curves through them.

    python bench/data_curve.py TARGET DATA OUT [--parts 16 8 4 2 1] [--steps 400] [--budgets 50 100 200 400 800]
        [--config FILE.yaml] [--features DIR] [--fit]

Data: the first 1/k of the conversations for every part k, each `--steps` optimizer steps under a schedule of its own.
Budget: all conversations, every number of `--budgets` steps. The recipe is that of a settings file of `tercel train`,
or its defaults. Every last head is measured on the same held-out conversations, those that `tercel train` would hold
out of the whole set. Before the largest run of each curve, what the smaller ones predict for it is written
(OUT/predicted-data.json, OUT/predicted-budget.json).

Runs lie in OUT and go on where they stopped; what is measured is kept in OUT/runs.json, which is also the form of
`src/tercel/measure/scaling.json`, where `tercel train --plan` looks: copy it there. `--fit` only fits what is there.
What a head gains in speed: `tercel bench TARGET OUT/RUN/last`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

import torch
from recipe import of_steps, settings_of

from tercel import Target
from tercel.chat import TokenizedChat, load_chats
from tercel.draft import DraftModel, load_head
from tercel.files import write_json
from tercel.measure.expected_tau import BUDGET, DATA, Measured, Runs, table
from tercel.measure.scaling import Point, choose
from tercel.reading import read_json
from tercel.target_model.protocol import TargetModel
from tercel.train.acceptance import simulate
from tercel.train.batches import plan_batches, plan_steps, split, usable
from tercel.train.config import TrainConfig
from tercel.train.feature_store import FeatureStore
from tercel.train.features import FeatureSupply
from tercel.train.lesson import lesson_of
from tercel.train.loop import EVAL_BATCH_TOKENS, train

NEEDED = 3  # points below the largest, so that it can be predicted


@dataclass(frozen=True)
class Sizes:
    """Parts of the data, each for `steps` steps, and budgets in steps on all data."""

    parts: Sequence[int]
    steps: int
    budgets: Sequence[int]

    def runs(self) -> Iterator[tuple[str, int, int]]:
        """Axis, part and steps of every run, the largest of an axis last."""
        yield from ((DATA, part, self.steps) for part in sorted(self.parts, reverse=True))
        yield from ((BUDGET, 1, steps) for steps in sorted(self.budgets))


@dataclass(frozen=True)
class Series:
    """Runs of one recipe on parts of the chats, all measured on what is held out of the whole."""

    target: TargetModel
    chats: Sequence[TokenizedChat]
    config: TrainConfig
    out: Path
    features: Path | None

    def measure(self, axis: str, part: int, steps: int) -> Measured:
        """Train, or go on, and measure the last head."""
        chats, out = self._part(part), self.out / f"part-{part}-steps-{steps}"
        summary = train(self.target, chats, of_steps(self.config, chats, steps), out, features=self.features)
        kept = self.out / f"{out.name}.json"
        if not kept.is_file():
            model = load_head(out / "last", dtype=self.target.dtype)
            write_json(kept, {"tau": self._tau(model), "seconds": summary.seconds, "tokens": summary.tokens})
        supervised, seen = self.tokens(part, steps)
        return Measured(axis, supervised, seen, summary.steps, float(read_json(kept)["tau"]))

    def tokens(self, part: int, steps: int) -> tuple[int, int]:
        """Different supervised tokens of a run, and how many it learns from, repeats counted."""
        chats = self._part(part)
        learned = split(self._usable(chats), self.config.eval_share).train
        lengths, supervised = [len(chat) for chat in learned], sum(int(chat.supervised.sum()) for chat in learned)
        plan = plan_steps(lengths, of_steps(self.config, chats, steps))
        tokens = sum(lengths[chat] for step in plan for micro in step for chat in micro)
        return supervised, round(supervised * tokens / sum(lengths))

    def _part(self, part: int) -> list[TokenizedChat]:
        return list(self.chats[: len(self.chats) // part])

    def _usable(self, chats: Sequence[TokenizedChat]) -> Sequence[TokenizedChat]:
        return usable(chats, min(self.config.max_length, self.target.context_length), self.target.vocab_size)

    def _tau(self, model: DraftModel) -> float:
        held_out = split(self._usable(self.chats), self.config.eval_share).held_out
        store = None if self.features is None else FeatureStore(self.features)
        supply = FeatureSupply(self.target, model.head, model.vocabulary, store)
        plan = plan_batches([len(chat) for chat in held_out], EVAL_BATCH_TOKENS, 1, 0)
        batches = (supply.batch([held_out[i] for i in indices]) for indices in plan)
        return simulate(lesson_of(self.config), model.head, batches, supply.to_draft).tau


def run_all(series: Series, sizes: Sizes) -> Runs:
    """All runs, one after the other, with what the smaller ones predict written before the largest."""
    planned, runs = list(sizes.runs()), Runs(series.target.source.name, series.config.ttt_steps, "", ())
    for number, (axis, part, steps) in enumerate(planned):
        largest = number + 1 == len(planned) or planned[number + 1][0] != axis
        if largest and len(runs.points(axis)) >= NEEDED:
            _predict(series, runs, axis, part, steps)
        found = series.measure(axis, part, steps)
        runs = replace(runs, runs=(*runs.runs, found), made=datetime.now().date().isoformat())
        runs.write(series.out / "runs.json", recipe={**series.config.values(), "data_steps": sizes.steps})
        print(f"{axis} 1/{part} {steps} steps: {found.supervised:,} supervised, {found.seen:,} seen, τ {found.tau:.3f}")
    return runs


def _predict(series: Series, runs: Runs, axis: str, part: int, steps: int) -> None:
    """Write what the runs so far predict for the largest of the axis, unless that was done before."""
    file = series.out / f"predicted-{axis}.json"
    if file.is_file():
        return
    supervised, seen = series.tokens(part, steps)
    tokens = supervised if axis == DATA else seen
    told = {form.curve.form: form.predict(tokens) for form in choose(runs.points(axis)) if form}
    write_json(
        file,
        {
            "tokens": tokens,
            "written": datetime.now().isoformat(timespec="seconds"),
            "preferred": choose(runs.points(axis))[0].curve.form,
            "forms": {form: {"tau": value.value, "ci95": value.ci95} for form, value in told.items()},
        },
    )


def report(out: Path) -> list[str]:
    """The fits of what was measured, and the largest runs beside what was predicted for them."""
    runs, lines = Runs.read(out / "runs.json"), []
    for axis in (DATA, BUDGET):
        points = runs.points(axis)
        if len(points) < NEEDED:
            continue
        lines += table(runs, axis)
        last = max(points, key=lambda point: point.tokens)
        lines += _outcome(out / f"predicted-{axis}.json", axis, last)
        one_left_out = choose([point for point in points if point != last])[0]
        told = one_left_out.predict(last.tokens)
        lines.append(
            f"{axis}: without its largest run ({last.tokens:,.0f} tokens) {told.value:.3f} "
            f"[{told.low:.3f}, {told.high:.3f}] is predicted; measured {last.tau:.3f}"
        )
    return lines


def _outcome(file: Path, axis: str, last: Point) -> list[str]:
    if not file.is_file():
        return []
    told = read_json(file)
    chosen = told["forms"][told["preferred"]]
    low, high = chosen["ci95"] or (math.nan, math.nan)
    return [
        f"{axis}: written on {told['written']}, before the largest run was made: {told['preferred']} "
        f"{chosen['tau']:.3f} [{low:.3f}, {high:.3f}]; measured {last.tau:.3f}"
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("data")
    parser.add_argument("out", type=Path)
    parser.add_argument("--parts", type=int, nargs="+", default=[16, 8, 4, 2, 1])
    parser.add_argument("--steps", type=int, default=400, help="of every part")
    parser.add_argument("--budgets", type=int, nargs="+", default=[50, 100, 200, 400, 800], help="steps on all data")
    parser.add_argument("--config", type=Path, help="the recipe, a settings file of tercel train")
    parser.add_argument("--features", type=Path, help="what tercel features made of the data")
    parser.add_argument("--fit", action="store_true", help="only fit what is there")
    asked = parser.parse_args()
    if not asked.fit:
        target = Target.load(asked.target, dtype=torch.bfloat16)
        given = settings_of(asked.config.read_text("utf-8"), str(asked.config)) if asked.config else {}
        config = TrainConfig(**{**given, "eval_every": 10**6, "save_every": 200})
        chats, _ = load_chats([asked.data], target.tokenizer, max_length=config.max_length)
        series = Series(target, chats, config, asked.out, asked.features)
        run_all(series, Sizes(asked.parts, asked.steps, asked.budgets))
    print("\n".join(report(asked.out)))


if __name__ == "__main__":
    main()
