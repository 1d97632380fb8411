"""The numbers of the EAGLE-3 paper, to be shown beside what is measured."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

from tercel.reading import parse_json

TARGET = "Vicuna 13B"  # the model on which the paper measured every method
MEAN = "mean"


@cache
def numbers() -> dict[str, Any]:
    """All of `paper.json`, as it stands."""
    found: dict[str, Any] = parse_json((files("tercel.measure") / "paper.json").read_text("utf-8"))
    return found


def source() -> str:
    return str(numbers()["source"])


def table1(temperature: float, method: str, task: str, target: str = TARGET) -> tuple[float, float] | None:
    """Speedup and τ in the paper's Table 1; None where it has none. task: by its file's name, or `MEAN`."""
    tasks = numbers()["tasks"]
    row = numbers()["table1"].get(f"{temperature:g}", {}).get(target, {}).get(method)
    if row is None or task not in tasks:
        return None
    speedup, tau = row[tasks.index(task)]
    return speedup, tau
