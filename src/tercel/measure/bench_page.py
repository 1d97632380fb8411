"""A benchmark as one page that a person can read without the paper."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from markupsafe import Markup

from tercel.measure import paper
from tercel.measure.intervals import with_interval
from tercel.measure.machine import in_precision, in_threads
from tercel.measure.summary import TRANSFORMERS, VANILLA, BenchReport
from tercel.measure.table import BEST, LEGEND, LEVEL, MARKS, Cell, Line, Number, Table1, table1
from tercel.pages import Bar, bars, page, render, stack


def bench_page(reports: Sequence[BenchReport]) -> str:
    """The page of a benchmark, a section for each temperature."""
    return page(f"tercel bench: {reports[0].target}", bench_body(reports))


def bench_body(reports: Sequence[BenchReport]) -> Markup:
    """What stands on it, for a page that holds more."""
    tables = [table1(report) for report in reports]
    return render(
        _template("bench_page"),
        target=reports[0].target,
        legend=LEGEND,
        paper_target=paper.TARGET,
        source=paper.source(),
        sections=[table_section(*pair) for pair in zip(tables, reports, strict=True)],
        told=[*_lossy(tables[0]), *_told(reports)],
    )


def table_section(table: Table1, report: BenchReport) -> dict[str, Any]:
    """What the template needs of a table, and of the time that its benchmark took."""
    last = table.columns[-1]
    where = ", mean over tasks" if last == paper.MEAN else f", {last}"
    drafting = [line.method for line in table.lines if line.method != TRANSFORMERS]
    return {
        "temperature": f"{table.temperature:g}",
        "headline": headline(table),
        "where": where,
        "speedups": speedup_bars(table),
        "taus": tau_bars(table),
        "table": render(
            _template("methods_table"),
            columns=table.columns,
            lines=[_line(line, table.columns) for line in table.lines],
        ),
        "paper": any(cell.paper for line in table.lines for cell in line.cells.values()),
        "compared": drafting,
        "pairs": _pairs(table, drafting) if len(drafting) > 2 else [],
        "split": time_split(report),
    }


def _template(name: str) -> str:
    return (files("tercel.measure") / f"{name}.html").read_text("utf-8")


def headline(table: Table1) -> str:
    """Who is fastest, how sure that is, in a sentence."""
    last = table.columns[-1]
    found = {line.title: line.cells[last].speedup for line in table.lines if line.method != TRANSFORMERS}
    known = {name: number.interval for name, number in found.items() if number.interval is not None}
    if not known:
        return "Nothing was measured."
    best = max(known, key=lambda name: known[name].value)
    if best == VANILLA:
        return "No method is faster than decoding token by token here."
    level = [name for name, number in found.items() if number.standing == LEVEL]
    sure = f"; {', '.join(level)} cannot be told apart from it" if level else ""
    return f"Fastest is {best}: {with_interval(known[best])} times as fast as token by token{sure}."


def speedup_bars(table: Table1) -> Markup:
    return _bars(table, 0)


def tau_bars(table: Table1) -> Markup:
    return _bars(table, 1)


def time_split(report: BenchReport) -> Markup | None:
    """Milliseconds of a step by phase, the methods' below each other; None where none says."""
    phases = list(dict.fromkeys(phase for split in report.time_split_ms.values() for phase in split))
    if not phases:
        return None
    rows = [
        (name, [split.get(phase, 0.0) for phase in phases], f"{sum(split.values()):.2f} ms")
        for name, split in report.time_split_ms.items()
    ]
    return stack(phases, rows)


def _bars(table: Table1, which: int) -> Markup:
    """which: 0 for speedup, 1 for τ."""
    last, found = table.columns[-1], []
    for line in table.lines:
        cell = line.cells[last]
        number = (cell.speedup, cell.tau)[which]
        if number.interval is None or (which and line.method in (VANILLA, TRANSFORMERS)):
            continue
        beside = None if cell.paper is None else cell.paper[which]
        text = f"{with_interval(number.interval)} {MARKS[number.standing]}".rstrip()
        base = line.method in (VANILLA, TRANSFORMERS)
        found.append(Bar(line.title, number.interval.value, text, number.interval.ci95, beside, base))
    return bars(found, one=True)


def _line(line: Line, columns: Sequence[str]) -> dict[str, Any]:
    identical = "–" if line.identical is None else f"{line.identical:.0%}"
    return {"method": line.title, "cells": [_cell(line.cells[name]) for name in columns], "identical": identical}


def _cell(cell: Cell) -> dict[str, Any]:
    told = "" if cell.paper is None else f"paper {cell.paper[0]:.2f}, τ {cell.paper[1]:.2f}"
    return {"numbers": [_number("", cell.speedup), _number("τ ", cell.tau)], "paper": told}


def _number(name: str, number: Number) -> dict[str, Any]:
    text = f"{name}{with_interval(number.interval)} {MARKS[number.standing]}".rstrip()
    return {"text": text, "best": number.standing == BEST}


def _pairs(table: Table1, names: Sequence[str]) -> list[tuple[str, list[str]]]:
    signs = {-1: "−", 0: "·", 1: "+"}
    rows = []
    for one in names:
        cells = []
        for other in names:
            if (one, other) in table.told_apart:
                speed, tau = table.told_apart[one, other]
            else:
                speed, tau = (-sign for sign in table.told_apart.get((other, one), (0, 0)))
            cells.append("" if one == other else f"{signs[speed]} {signs[tau]}")
        rows.append((one, cells))
    return rows


def _lossy(table: Table1) -> list[str]:
    return [
        f"{line.method} is LOSSY: {line.lossy} changes the text, which is not the model's own."
        for line in table.lines
        if line.lossy is not None
    ]


def _told(reports: Sequence[BenchReport]) -> list[str]:
    first = reports[0]
    precision = in_precision(first.dtype, first.weights)
    where = f"{first.device}, {in_threads(first.threads)}" if first.device == "cpu" else first.device
    heads = first.heads or ({"head": first.head} if first.head else {})
    told = [
        f"Target {first.target} in {precision} on {where}, computed by {first.backend}.",
        f"At most {first.params.max_new_tokens} tokens an answer; every question asked "
        + ("once." if first.repeats == 1 else f"{first.repeats} times, each with a seed of its own."),
        *(f"Head of {name}: {head}." for name, head in heads.items()),
        "Versions: " + ", ".join(f"{name} {version}" for name, version in first.versions.items()) + ".",
        f"Measured at {reports[-1].timestamp}.",
    ]
    if reports[-1].sittings > 1:
        told.append(
            f"The times are of {reports[-1].sittings} sittings, since the benchmark was interrupted; every pair of "
            "answers that is compared is of one."
        )
    return told
