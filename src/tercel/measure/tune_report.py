"""What tuning found, as tables for the terminal and as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rich.table import Table

from tercel.files import atomic_file
from tercel.measure.intervals import Interval
from tercel.measure.machine import in_precision, in_threads
from tercel.measure.report import check_picture
from tercel.measure.summary import VANILLA
from tercel.measure.tune import as_flags, told
from tercel.measure.tune_here import Tuning
from tercel.measure.tune_there import EngineCosts, Simulation


def tuning_table(found: Tuning) -> Table:
    """A line a setting, the fastest first; who was dropped early has fewer prompts."""
    table = Table(title=title(found))
    for place, heading in enumerate(
        ("setting", "prompts", "tokens/s", "τ", "over no drafts", "over no drafts, last round")
    ):
        table.add_column(heading, justify="right" if place else "left", no_wrap=not place)
    for name, values in sorted(found.measured.items(), key=lambda item: -item[1].speedup.value):
        last = found.last.get(name)
        table.add_row(
            as_flags(name),
            str(values.questions),
            _rate(values.rate),
            "–" if values.tau is None else f"{values.tau:.2f}",
            "1" if name == VANILLA else told(values.speedup),
            "" if last is None or name == VANILLA else told(last.speedup),
        )
    return table


def title(found: Tuning) -> str:
    head = f"{found.settings.head} on " if found.settings.head else ""
    slots = f", {found.settings.slots} at a time" if found.settings.slots > 1 else ""
    precision = in_precision(found.dtype, found.weights)
    return f"{head}{found.target}, {precision}, {found.device}, {in_threads(found.threads)}{slots}"


def simulation_table(engine: str, found: Simulation, costs: EngineCosts | None) -> Table:
    """A line a setting of the engine."""
    table = Table(title=f"what {engine} would accept, on {found.answers} answers")
    headings = ["tokens drafted", *(["top-k"] if found.trees else []), "verified", "τ: pays below that × one token"]
    for heading in [*headings, *(["ms a step", "over no drafts"] if costs is not None else [])]:
        table.add_column(heading, justify="right")
    for drafted in found.all:
        shape = drafted.shape
        cells = [str(shape.depth), *([str(shape.top_k)] if found.trees else []), str(shape.nodes), told(drafted.tau)]
        if costs is not None:
            cells += [f"{costs.step(shape):.3g}", told(costs.speedup(drafted))]
        table.add_row(*cells, end_section=drafted is found.chains[-1])
    return table


def plot_tuning(found: Tuning, path: Path) -> None:
    """Draw tokens a second by setting. Raises `TercelError` as `check_picture`, and if `path` cannot be written."""
    bars = {as_flags(name): values.rate for name, values in found.measured.items()}
    _plot(bars, as_flags(found.verdict.setting), "tokens a second", title(found), path)


def plot_simulation(engine: str, found: Simulation, costs: EngineCosts | None, path: Path) -> None:
    """Draw speed over no drafts by setting, or τ where costs are not known. Raises as `plot_tuning`."""
    values = {str(d.shape): d.tau if costs is None else costs.speedup(d) for d in found.all}
    name = "τ, tokens a step" if costs is None else "times as fast as without drafts"
    _plot(values, "", name, f"{engine}, simulated on {found.answers} answers", path)


def _plot(values: Mapping[str, Interval], marked: str, axis: str, heading: str, path: Path) -> None:
    kind = check_picture(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 1.2 + 0.26 * len(values)), dpi=150, layout="constrained")
    axes = figure.subplots()
    for place, (name, value) in enumerate(values.items()):
        spread = None if value.ci95 is None else [[value.value - value.low], [value.high - value.value]]
        colour = "C1" if name == marked else "C0"
        axes.errorbar([value.value], [place], xerr=spread, color=colour, marker="o", markersize=4, capsize=3)
    axes.set_yticks(range(len(values)), list(values), fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(f"{axis}, 95 % intervals")
    axes.set_title(heading, fontsize=9)
    axes.grid(axis="x", alpha=0.3)
    with atomic_file(path) as partial:
        figure.savefig(partial, format=kind)


def _rate(rate: Interval) -> str:
    return f"{rate.value:.1f}" if rate.ci95 is None else f"{rate.value:.1f} [{rate.low:.1f}, {rate.high:.1f}]"
