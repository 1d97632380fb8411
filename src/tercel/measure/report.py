"""A benchmark's numbers as a table for the terminal and as a picture."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from rich.table import Table

from tercel.errors import TercelError
from tercel.files import atomic_file, is_stream
from tercel.measure.intervals import Interval
from tercel.measure.machine import in_precision, in_threads
from tercel.measure.summary import BenchReport, MethodSummary

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


def check_picture(path: Path) -> str:
    """The format that a picture's file name asks for; PNG where it is no file. Raises `TercelError` for another name,
    and without matplotlib."""
    suffix = ".png" if is_stream(path) else path.suffix.lower()
    if suffix not in FORMATS:
        raise TercelError(f"{path} is no name of a picture that is drawn here; let it end in {' or '.join(FORMATS)}")
    if find_spec("matplotlib") is None:
        raise TercelError("drawing needs matplotlib; install it with: pip install 'tercel[report]'")
    return suffix.removeprefix(".")


def plot_bench(report: BenchReport, path: Path) -> None:
    """Draw tokens a second of every method by task, with 95 % intervals, and each bar's τ above it.

    Raises `TercelError` as `check_picture`, and if `path` cannot be written.
    """
    kind = check_picture(path)
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(name for task in report.tasks for name in task.methods))
    width = 0.8 / len(names)
    figure = Figure(figsize=(max(6.0, 1.6 * len(report.tasks) * max(2, len(names)) / 2), 4.2), dpi=150)
    axes = figure.subplots()
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
    axes.set_title(_ran(report), fontsize=9)
    axes.margins(y=0.15)
    axes.legend(fontsize=8)
    figure.tight_layout()
    with atomic_file(path) as partial:
        figure.savefig(partial, format=kind)


def _ran(report: BenchReport) -> str:
    precision = in_precision(report.dtype, report.weights)
    return f"{report.target}, {precision}, {report.device}, {in_threads(report.threads)}"


def _cells(summary: MethodSummary) -> tuple[str, ...]:
    return (
        str(summary.questions),
        str(summary.tokens),
        _text(summary.rate, "{:.1f}"),
        _text(summary.tau, "{:.2f}"),
        _text(summary.speedup, "{:.2f}"),
        _text(summary.over_transformers, "{:.2f}"),
        "–" if summary.identical is None else f"{summary.identical.value:.0%}",
    )


def _text(interval: Interval | None, pattern: str) -> str:
    if interval is None:
        return "–"
    text = pattern.format(interval.value)
    if interval.ci95 is None or interval.low == interval.high:
        return text
    return f"{text} [{pattern.format(interval.low)}, {pattern.format(interval.high)}]"


def _error_bar(interval: Interval) -> list[list[float]] | None:
    if interval.ci95 is None:
        return None
    return [[interval.value - interval.low], [interval.high - interval.value]]
