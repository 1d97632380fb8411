"""The experiments: what each needs, and how it is measured. One entry here is all that a further one takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tercel.errors import TercelError
from tercel.measure.manifest import Entry
from tercel.measure.samples import SPEED, TAU, Samples
from tercel.measure.summary import BenchReport
from tercel.reproduce.claims import FEW_AND_MANY, P_EAGLE_PAPER, PARTS
from tercel.reproduce.scales import PAPER_TASKS, ROBUST_TASKS
from tercel.reproduce.world import World, at_temperature

TEMPERATURES = (0.0, 1.0)
MORE_CHAINS = 5  # times as many questions: few chains come far, and no clock is read
LEFT_OPEN = "What the EAGLE-3 paper left open, measured"


@dataclass(frozen=True)
class Measured:
    """samples: rates by quantity, which claims are judged by; reports: benchmarks with drafts as large as pays and in
    the papers' trees, by temperature, of the experiments that have them; extra: numbers to be shown beside."""

    samples: Samples
    reports: Sequence[tuple[BenchReport, BenchReport]] = ()
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Experiment:
    """about: what is asked, in a sentence; names: what is measured, of which some may not be there; tasks: by name;
    origin: whose experiment it is."""

    about: str
    names: tuple[str, ...]
    tasks: tuple[str, ...]
    measure: Callable[[Experiment, World], Measured]
    temperatures: tuple[float, ...] = (0.0,)
    origin: str = "An experiment of the EAGLE-3 paper, done again"

    def entries(self, world: World) -> dict[str, Entry]:
        """Raises `TercelError` if none of the names is there."""
        found = world.there(self.names)
        if not found:
            raise TercelError(f"nothing of {', '.join(self.names)} is there to be measured; name heads with --heads")
        return found


def _benchmarks(experiment: Experiment, world: World) -> Measured:
    """Speed with drafts as large as pays, τ in the papers' trees, at every temperature."""
    entries, tasks = experiment.entries(world), world.some(experiment.tasks)
    samples, reports, splits = Samples({}), [], {}
    for temperature in experiment.temperatures:
        name = "-".join(("bench", *experiment.names[:1], *experiment.tasks[:1]))
        fixed = world.bench(name, entries, tasks, temperature)
        sized = world.bench(name, entries, tasks, temperature, sized=True)
        samples = samples.merged(at_temperature(fixed, TAU, temperature))
        samples = samples.merged(at_temperature(sized, SPEED, temperature))
        reports.append((sized, fixed))
        told = {"sized": sized.time_split_ms, "papers_trees": fixed.time_split_ms}
        splits[f"T{temperature:g}"] = {trees: dict(split) for trees, split in told.items()}
    return Measured(samples, reports, {"time_split_ms": splits})


def _against_data(experiment: Experiment, world: World) -> Measured:
    """τ of heads that learned from parts of the data."""
    entries, tasks = experiment.entries(world), world.some(experiment.tasks)
    fixed = world.bench("bench-data", entries, tasks, 0.0)
    found = at_temperature(fixed, TAU, 0.0).columns
    columns = {}
    for quantity, column in found.items():
        kind, name = quantity.removesuffix("/T0").split("/", 1)
        columns[f"{kind}/{name}" if "/" in name else f"{kind}/{name}/1of1"] = column
    return Measured(Samples(columns), (), {"parts": list(PARTS)})


def _chains(depth: int | None) -> Callable[[Experiment, World], Measured]:
    """n-α over chains of `depth` drafts; None for the scale's length."""

    def measure(experiment: Experiment, world: World) -> Measured:
        entries, tasks = experiment.entries(world), world.some(experiment.tasks, MORE_CHAINS)
        samples, length = Samples({}), depth or world.scale.chain
        for temperature in experiment.temperatures:
            samples = samples.merged(world.alphas(entries, tasks, temperature, length))
        extra = {"depth": length, "temperatures": list(experiment.temperatures)}
        return Measured(samples, (), {**extra, "questions": max(len(task.questions) for task in tasks)})

    return measure


def _batches(experiment: Experiment, world: World) -> Measured:
    """Throughput at every batch of the scale."""
    batches = world.scale.batches
    return Measured(_throughputs(experiment, world, ("eagle3",), batches), (), {"batches": list(batches)})


def _throughputs(
    experiment: Experiment, world: World, sized: Sequence[str], batches: Sequence[int]
) -> Samples:
    """With chains of three drafts, as the paper has it; `-sized`: those also with drafts as large as pays."""
    found = experiment.entries(world)
    chains = {name: replace(entry, tree=entry.tree or "chain:3") for name, entry in found.items()}
    large = {f"{name}-sized": replace(entry, tree=None) for name, entry in found.items() if name in sized}
    return world.throughputs({**chains, **large}, world.some(experiment.tasks), batches)


def _side_by_side(experiment: Experiment, world: World) -> Measured:
    """Speed and τ, and throughput with one and with many requests at a time."""
    found = _benchmarks(experiment, world)
    throughputs = _throughputs(experiment, world, experiment.names, FEW_AND_MANY)
    extra = {**found.extra, "batches": list(FEW_AND_MANY)}
    return replace(found, samples=found.samples.merged(throughputs), extra=extra)


def _depths(experiment: Experiment, world: World) -> Measured:
    """The same head in trees of two depths."""
    entry = experiment.entries(world)["eagle3"]
    trees = {f"eagle3-depth-{depth}": replace(entry, tree=f"10x{depth}x60") for depth in (6, 8)}
    report = world.bench("bench-depth", trees, world.some(experiment.tasks), 0.0)
    samples = at_temperature(report, TAU, 0.0).merged(at_temperature(report, SPEED, 0.0))
    return Measured(samples, [(report, report)])


EXPERIMENTS: dict[str, Experiment] = {
    "table1": Experiment(
        "How fast is each method, and how many tokens does a pass of the target yield?",
        ("sps", "pld", "lookahead", "medusa", "hydra", "eagle", "eagle2", "hass", "eagle3", "mtp"),
        PAPER_TASKS,
        _benchmarks,
        TEMPERATURES,
    ),
    "table2": Experiment(
        "What do leaving out the feature loss, and fusing features of several layers, each bring?",
        ("eagle2", "eagle3-top-layer", "eagle3"),
        ("mt_bench", "gsm8k"),
        _benchmarks,
    ),
    "fig1": Experiment(
        "Does a head go on to gain from more data?",
        tuple(
            f"{method}/1of{part}" if part > 1 else method for method in ("eagle3", "eagle2") for part in PARTS
        ),
        ("mt_bench",),
        _against_data,
    ),
    "fig4": Experiment(
        "How well do heads draft from the target's features, and from an output of their own?",
        ("eagle", "no-feature-loss", "eagle3"),
        ("mt_bench",),
        _chains(2),
    ),
    "fig7": Experiment(
        "How well do heads draft from more and more outputs of their own?",
        ("eagle", "eagle3"),
        ("mt_bench", "gsm8k", "humaneval"),
        _chains(None),
        TEMPERATURES,
    ),
    "table3": Experiment(
        "What is the throughput with many requests at a time?", ("eagle", "eagle3"), ("mt_bench",), _batches
    ),
    "depth": Experiment(
        "Are trees of depth 8 better than of depth 6?",
        ("eagle3",),
        ("mt_bench", "gsm8k"),
        _depths,
        origin=LEFT_OPEN,
    ),
    "robust": Experiment(
        "What is left of it in other languages, tool calls and behind long documents?",
        ("eagle", "eagle2", "eagle3"),
        ROBUST_TASKS,
        _benchmarks,
        origin=LEFT_OPEN,
    ),
    "parallel": Experiment(
        "Is a head better that drafts all positions in one forward?",
        ("eagle3", "p-eagle"),
        PAPER_TASKS,
        _side_by_side,
        TEMPERATURES,
        origin=f"{P_EAGLE_PAPER} beside EAGLE-3, their heads trained on the same data by the same budget; measured",
    ),
}
