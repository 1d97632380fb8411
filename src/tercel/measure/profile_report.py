"""A profile as tables for the terminal and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from tercel.decode.clock import PHASES
from tercel.files import atomic_file
from tercel.measure.profile_result import Profile, Timed, in_ms
from tercel.measure.report import check_picture

_EACH = ("ms", "95 %", "floor", "efficiency", "bound")


def profile_tables(profile: Profile) -> list[Table]:
    """Forwards by width and context if there are several, the pieces behind the usual one beside their floors, and
    whole steps."""
    wide = [_by_context(profile)] if len(profile.forward) > 1 else []
    return [*wide, _pieces(profile), _steps(profile)]


def ceilings_line(profile: Profile) -> str:
    reads, peak = profile.ceilings.bandwidth.best / 1e9, profile.ceilings.peak.best / 1e9
    return (
        f"Floors: weights and keys read once at {reads:.3g} GB/s, or products at {peak:,.0f} GFLOP/s in "
        f"{profile.dtype}, the best of this run. Times: medians of {profile.rounds} rounds; efficiency: floor ÷ time."
    )


def plot_profile(profile: Profile, path: Path) -> None:
    """Draw forwards beside their floors, a head's levels and the shares of a step.

    Raises `TercelError` as `check_picture`, and if `path` cannot be written.
    """
    kind = check_picture(path)
    from matplotlib.figure import Figure

    ratios = [3, 2, 2] if profile.levels else [3, 2]
    figure = Figure(figsize=(sum(ratios) * 1.9, 4.0), dpi=150, layout="constrained")
    axes = figure.subplots(1, len(ratios), width_ratios=ratios)
    _draw_forwards(axes[0], profile)
    if profile.levels:
        _draw_levels(axes[1], profile.levels)
    _draw_steps(axes[-1], profile)
    figure.suptitle(profile.title(), fontsize=9)
    with atomic_file(path) as partial:
        figure.savefig(partial, format=kind)


def _by_context(profile: Profile) -> Table:
    table = Table(title="target forward by context, ms (efficiency)")
    table.add_column("block", justify="right")
    for length in profile.forward:
        table.add_column(f"{length:,} tokens", justify="right")
    for width in profile.usual:
        cells = (widths[width] for widths in profile.forward.values())
        table.add_row(str(width), *(f"{in_ms(timed.ms.value)} ({timed.efficiency:.0%})" for timed in cells))
    return table


def _pieces(profile: Profile) -> Table:
    table = Table(title=f"the pieces of a step after {profile.context:,} tokens, ms")
    for place, heading in enumerate(("piece", "", *_EACH)):
        table.add_column(heading, justify="left" if place < 1 else "right")
    parts: dict[str, Mapping[Any, Timed]] = {"target forward": profile.usual, "output layer": profile.output}
    parts["head"] = {name if name == "commit" else f"level {name}": timed for name, timed in profile.levels.items()}
    for part, rows in parts.items():
        for place, (name, timed) in enumerate(rows.items()):
            table.add_row("" if place else part, str(name), *_cells(timed), end_section=place == len(rows) - 1)
    return table


def _cells(timed: Timed) -> Sequence[str]:
    spread = "–" if timed.ms.ci95 is None else f"[{in_ms(timed.ms.low)}, {in_ms(timed.ms.high)}]"
    return in_ms(timed.ms.value), spread, in_ms(timed.floor_ms), f"{timed.efficiency:.0%}", timed.bound


def _steps(profile: Profile) -> Table:
    table = Table(title="whole steps over real prompts, ms (share)")
    for place, heading in enumerate(("method", *PHASES, "step", "nodes", "τ", "ms/token")):
        table.add_column(heading, justify="right" if place else "left", no_wrap=not place)
    for name, steps in profile.steps.items():
        phases = (f"{in_ms(steps.ms[phase].value)} ({steps.share[phase].value:.0%})" for phase in PHASES)
        rest = in_ms(steps.step_ms), f"{steps.nodes:.1f}", f"{steps.tau.value:.2f}", in_ms(steps.token_ms)
        table.add_row(name, *phases, *rest)
    return table


def _draw_forwards(axes: Any, profile: Profile) -> None:
    for place, (length, widths) in enumerate(profile.forward.items()):
        values = [timed.ms for timed in widths.values()]
        known = all(value.ci95 is not None for value in values)
        spread = [[v.value - v.low for v in values], [v.high - v.value for v in values]] if known else None
        middle, name = [value.value for value in values], f"{length:,} tokens of context"
        axes.errorbar(list(widths), middle, spread, color=f"C{place}", marker="o", markersize=3, capsize=2, label=name)
        axes.plot(list(widths), [timed.floor_ms for timed in widths.values()], color=f"C{place}", linestyle="--")
    axes.plot([], [], color="grey", linestyle="--", label="floor of each")
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(profile.usual), [str(width) for width in profile.usual])
    axes.set_yscale("log")
    axes.set_xlabel("tokens of a block")
    axes.set_ylabel("ms")
    axes.set_title("target forward", fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)


def _draw_levels(axes: Any, levels: Mapping[str, Timed]) -> None:
    places = range(len(levels))
    axes.bar(places, [timed.ms.value for timed in levels.values()], color="C0", label="time")
    floors = [timed.floor_ms for timed in levels.values()]
    axes.hlines(floors, [p - 0.4 for p in places], [p + 0.4 for p in places], color="black", label="floor")
    axes.set_xticks(places, [name if name == "commit" else f"level {name}" for name in levels], rotation=45, fontsize=7)
    axes.set_ylabel("ms")
    axes.set_title("draft head", fontsize=9)
    axes.legend(fontsize=7)


def _draw_steps(axes: Any, profile: Profile) -> None:
    below = [0.0] * len(profile.steps)
    for place, phase in enumerate(PHASES):
        shares = [100 * steps.share[phase].value for steps in profile.steps.values()]
        axes.bar(range(len(shares)), shares, 0.6, below, color=f"C{place}", label=phase)
        below = [low + share for low, share in zip(below, shares, strict=True)]
    axes.set_xticks(range(len(profile.steps)), list(profile.steps), fontsize=7)
    axes.set_xlim(-0.6, len(profile.steps) - 0.4)
    axes.set_ylabel("% of a step")
    axes.set_title("steps", fontsize=9)
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
