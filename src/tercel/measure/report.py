"""A benchmark's numbers as tables for the terminal, as lines for a spreadsheet and as a picture."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.table import Table

from tercel.decode.proposers import EAGLE3
from tercel.errors import TercelError
from tercel.files import atomic_file, is_stream
from tercel.measure import paper
from tercel.measure.intervals import Interval, with_interval
from tercel.measure.machine import in_precision, in_threads
from tercel.measure.summary import BenchReport, MethodSummary
from tercel.measure.table import MARKS, Cell, Line, Number, Table1, table1

FORMATS = (".png", ".svg")
HEADINGS = (
    "task",
    "method",
    "questions",
    "tokens",
    "tokens/s",
    "τ",
    "speedup",
    "over transformers",
    "identical",
)
_INTERVALS = ("speedup", "tau", "tokens_per_s", "speedup_vs_transformers", "identical")
CSV_COLUMNS = (
    *("temperature", "task", "method", "questions", "tokens", "seconds"),
    *(f"{name}{end}" for name in _INTERVALS for end in ("", "_low", "_high")),
    *("speedup_standing", "tau_standing", "paper_speedup", "paper_tau", "lossy", "target", "head", "dtype", "device"),
)


def bench_table(report: BenchReport) -> Table:
    """One line a task and method; intervals are 95 %."""
    title = _ran(report)
    if report.head:
        title = f"{report.head} on {title}"
    table = Table(title=title)
    for place, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="left" if place < 2 else "right", no_wrap=place < 2)
    for task in report.tasks:
        for place, (name, summary) in enumerate(task.methods.items()):
            last = place == len(task.methods) - 1
            title = name if summary.lossy is None else f"{name} (LOSSY)"
            table.add_row("" if place else task.name, title, *_cells(summary), end_section=last)
    return table


def table1_text(table: Table1) -> Table:
    """The layout of the paper's Table 1: in every cell speedup, τ, and below them the paper's."""
    text = Table(
        title=f"T={table.temperature:g}: speedup and τ, 95 % intervals; paper: {paper.TARGET}", show_lines=True
    )
    text.add_column("method", no_wrap=True)
    for column in table.columns:
        text.add_column(column)
    for line in table.lines:
        text.add_row(line.title, *(_cell_text(line.cells[column]) for column in table.columns))
    return text


def report_json(reports: Sequence[BenchReport]) -> dict[str, Any]:
    """One benchmark's numbers; of several temperatures theirs in a list. `table1` is the paper's layout of each."""
    tables = [table1(report).to_json() for report in reports]
    if len(reports) == 1:
        return {**reports[0].to_json(), "table1": tables}
    return {"reports": [report.to_json() for report in reports], "table1": tables}


def csv_text(reports: Sequence[BenchReport]) -> str:
    """A line a temperature, task (and their mean) and method, with the column names of `CSV_COLUMNS`."""
    out = io.StringIO()
    writer = csv.DictWriter(out, CSV_COLUMNS, lineterminator="\n")
    writer.writeheader()
    for report in reports:
        table, tasks = table1(report), {task.name: task for task in report.tasks}
        for column in table.columns:
            for line in table.lines:
                summary = tasks[column].methods.get(line.method) if column in tasks else None
                writer.writerow(_csv_row(report, table, column, line, summary))
    return out.getvalue()


def check_picture(path: Path) -> str:
    """The format that a picture's file name asks for; PNG where it is no file. Raises `TercelError` for another name,
    and without matplotlib."""
    suffix = ".png" if is_stream(path) else path.suffix.lower()
    if suffix not in FORMATS:
        raise TercelError(f"{path} is no name of a picture that is drawn here; let it end in {' or '.join(FORMATS)}")
    if find_spec("matplotlib") is None:
        raise TercelError("drawing needs matplotlib; install it with: pip install 'tercel[report]'")
    return suffix.removeprefix(".")


def plot_bench(reports: Sequence[BenchReport], path: Path) -> None:
    """Draw tokens a second of every method by task, with 95 % intervals, and each bar's τ above it; one below the other
    for several temperatures.

    Raises `TercelError` as `check_picture`, and if `path` cannot be written.
    """
    kind = check_picture(path)
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(name for report in reports for task in report.tasks for name in task.methods))
    most = max(len(report.tasks) for report in reports)
    figure = Figure(figsize=(max(6.0, 1.6 * most * max(2, len(names)) / 2), 4.2 * len(reports)), dpi=150)
    for axes, report in zip(figure.subplots(len(reports), squeeze=False)[:, 0], reports, strict=True):
        _draw(axes, report, names)
    figure.tight_layout()
    with atomic_file(path) as partial:
        figure.savefig(partial, format=kind)


def _draw(axes: Any, report: BenchReport, names: Sequence[str]) -> None:
    width = 0.8 / len(names)
    for place, name in enumerate(names):
        for at, task in enumerate(report.tasks):
            if name not in task.methods:
                continue
            summary = task.methods[name]
            x = at + (place - (len(names) - 1) / 2) * width
            title = name if summary.lossy is None else f"{name} (lossy)"
            label = title if at == 0 else None
            axes.bar(
                x,
                summary.rate.value,
                width,
                color=f"C{place}",
                label=label,
                yerr=_error_bar(summary.rate),
                capsize=2,
            )
            if summary.tau is not None:
                top = summary.rate.value if summary.rate.ci95 is None else summary.rate.high
                axes.annotate(
                    f"τ {summary.tau.value:.2f}",
                    (x, top),
                    (0, 2),
                    textcoords="offset points",
                    ha="center",
                    fontsize=7,
                )
    axes.set_xticks(range(len(report.tasks)), [task.name for task in report.tasks])
    axes.set_ylabel("tokens a second")
    axes.set_title(f"{_ran(report)}, T={report.params.temperature:g}", fontsize=9)
    axes.margins(y=0.15)
    axes.legend(fontsize=8)


def _cell_text(cell: Cell) -> str:
    lines = [_number_text("", cell.speedup), _number_text("τ ", cell.tau)]
    if cell.paper is not None:
        lines.append(f"paper {cell.paper[0]:.2f}, τ {cell.paper[1]:.2f}")
    return "\n".join(lines)


def _number_text(name: str, number: Number) -> str:
    return f"{name}{with_interval(number.interval)} {MARKS[number.standing]}".rstrip()


def _csv_row(
    report: BenchReport, table: Table1, column: str, line: Line, summary: MethodSummary | None
) -> dict[str, Any]:
    """summary: of a task; None for the mean over tasks."""
    cell, head = line.cells[column], report.heads.get(line.method, report.head if line.method == EAGLE3 else None)
    row: dict[str, Any] = {
        "temperature": f"{table.temperature:g}",
        "task": column,
        "method": line.method,
        "lossy": line.lossy or "",
        "speedup_standing": cell.speedup.standing,
        "tau_standing": cell.tau.standing,
        "target": report.target,
        "head": head or "",
        "dtype": in_precision(report.dtype, report.weights),
        "device": report.device,
    }
    if cell.paper is not None:
        row["paper_speedup"], row["paper_tau"] = cell.paper
    intervals = {"speedup": cell.speedup.interval, "tau": cell.tau.interval}
    if summary is not None:
        row |= {"questions": summary.questions, "tokens": summary.tokens, "seconds": summary.seconds}
        intervals |= {
            "tokens_per_s": summary.rate,
            "speedup_vs_transformers": summary.over_transformers,
            "identical": summary.identical,
        }
    for name, interval in intervals.items():
        if interval is not None:
            row[name] = interval.value
            row[f"{name}_low"], row[f"{name}_high"] = interval.ci95 or ("", "")
    return row


def _ran(report: BenchReport) -> str:
    precision = in_precision(report.dtype, report.weights)
    return f"{report.target}, {precision}, {report.device}, {in_threads(report.threads)}"


def _cells(summary: MethodSummary) -> tuple[str, ...]:
    return (
        str(summary.questions),
        str(summary.tokens),
        with_interval(summary.rate, 1),
        with_interval(summary.tau),
        with_interval(summary.speedup),
        with_interval(summary.over_transformers),
        "–" if summary.identical is None else f"{summary.identical.value:.0%}",
    )


def _error_bar(interval: Interval) -> list[list[float]] | None:
    if interval.ci95 is None:
        return None
    return [[interval.value - interval.low], [interval.high - interval.value]]
