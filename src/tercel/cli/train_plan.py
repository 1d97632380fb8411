"""`tercel train --plan`: what a run would take."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from rich.table import Table

from tercel.cli.consoles import PlainConsole

if TYPE_CHECKING:
    from tercel.measure.forecast import Forecast
    from tercel.measure.intervals import Interval


def print_plan(console: PlainConsole, told: Forecast) -> None:
    """The forecast, and what speaks against the run."""
    table = Table(title="what the run would take", title_justify="left")
    for name in ("", "forecast", "95 % interval"):
        table.add_column(name)
    tau, spent = told.expected.tau, told.seconds
    rows = [
        ("steps", f"{told.steps:,}, evaluated {told.evaluations:,} times", ""),
        ("tokens", f"{told.tokens:,}", ""),
        ("tokens/s", f"{told.tokens_per_s.value:,.0f}", _bounds(told.tokens_per_s, "{:,.0f}")),
        ("time", _time(spent.value), "" if spent.ci95 is None else " to ".join(map(_time, spent.ci95))),
        ("held-out τ", *(("not known", "") if tau is None else (f"{tau.value:.2f}", _bounds(tau, "{:.2f}")))),
        ("memory", f"{told.calibration.memory / 1e6:,.0f} MB", ""),
        ("disk, head and state", f"{told.run_bytes / 1e6:,.0f} MB", ""),
        *([("disk, features", f"{told.features / 1e6:,.0f} MB", "")] if told.features else []),
    ]
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print_line(
        f"time and memory: of {told.calibration.micro_batches} micro-batches on this machine as it is now; the target "
        f"takes {told.calibration.target_share:.0%} of a step"
    )
    console.print_line(f"τ: {told.expected.told}")
    if told.run_bytes + told.features > told.free:
        console.print_line(f"warning: the disk has {told.free / 1e6:,.0f} MB left")


def _bounds(value: Interval, form: str) -> str:
    return "" if value.ci95 is None else f"{form.format(value.low)} to {form.format(value.high)}"


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else str(timedelta(seconds=round(seconds)))
