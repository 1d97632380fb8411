"""How `tercel inspect --probe` shows the readings it has tried."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from tercel.measure.intervals import Interval
    from tercel.measure.probe import ProbeReport


def probe_table(report: ProbeReport) -> Table:
    """One row a reading: n-α by position, tokens a step, and how many times those of the reading as it stands."""
    depth = len(report.rows[0].alpha)
    table = Table(title=f"readings, on {report.prompts} answers of the target", title_justify="left")
    for name in ("reading", *(f"{n}-α" for n in range(depth)), "τ (95 %)", "against as read"):
        table.add_column(name, justify="left" if name == "reading" else "right", no_wrap=True)
    for row in report.rows:
        alpha = ["-" if value is None else f"{value:.3f}" for value in row.alpha]
        gain = "" if row is report.rows[0] else _with_range(row.gain, "× ")
        table.add_row(row.setting, *alpha, _with_range(row.tau), gain, style="bold" if row.clearly_better else "")
    return table


def _with_range(interval: Interval, unit: str = "") -> str:
    ends = interval.ci95
    return f"{unit}{interval.value:.2f}" + ("" if ends is None else f" ({ends[0]:.2f}–{ends[1]:.2f})")
