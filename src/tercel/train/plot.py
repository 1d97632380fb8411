"""Curves of a run: loss, accuracy and held-out acceptance length over steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tercel.errors import TercelError
from tercel.files import atomic_file
from tercel.train.journal import Journal

SMOOTHING = 0.98  # of the exponential mean drawn over the noisy per-step values


def plot_curves(metrics: Path, out: Path) -> None:
    """Draw the run's `metrics.jsonl` into the PNG file `out`.

    Raises `TercelError` without matplotlib, and if nothing has been trained yet.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise TercelError("curves are drawn with matplotlib: pip install 'tercel[report]'") from error
    entries = Journal(metrics).entries()
    steps = [entry for entry in entries if "loss" in entry]
    if not steps:
        raise TercelError(f"{metrics} holds no step yet; there is nothing to draw")
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    _noisy(left, steps, "loss", "training loss")
    _noisy(middle, steps, "accuracy", "accuracy of the first draft")
    evaluated = [entry for entry in entries if "eval" in entry]
    right.plot([r["step"] for r in evaluated], [r["eval"]["tau"] for r in evaluated], marker="o", markersize=3)
    right.set_title("held-out acceptance length τ")
    for axes in (left, middle, right):
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    with atomic_file(out) as partial:
        figure.savefig(partial, format="png", dpi=120)


def _noisy(axes: Any, entries: list[dict[str, Any]], key: str, title: str) -> None:
    """The values of every step, pale, and their exponential mean (without its start-up bias)."""
    steps, values = [entry["step"] for entry in entries], [entry[key] for entry in entries]
    mean, weight, means = 0.0, 0.0, []
    for value in values:
        mean = SMOOTHING * mean + (1 - SMOOTHING) * value
        weight = SMOOTHING * weight + (1 - SMOOTHING)
        means.append(mean / weight)
    axes.plot(steps, values, alpha=0.25, linewidth=0.8)
    axes.plot(steps, means, color="C0")
    axes.set_title(title)
