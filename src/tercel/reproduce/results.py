"""What an experiment measured, kept where it can be judged again, and shown beside the paper: JSON, text and a page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from markupsafe import Markup

from tercel.decode.proposers import VANILLA
from tercel.errors import TercelError
from tercel.files import write_json, write_text
from tercel.measure import paper
from tercel.measure.bench_page import table_section, time_split
from tercel.measure.intervals import Interval, with_interval
from tercel.measure.samples import SPEED, TAU, Samples, ratio, value
from tercel.measure.summary import BenchReport
from tercel.measure.table import LEGEND, table1
from tercel.pages import Bar, Series, bars, lines, page, render
from tercel.reading import read_json
from tercel.reproduce.claims import PARTS
from tercel.reproduce.experiments import EXPERIMENTS, Measured
from tercel.reproduce.rules import Judged
from tercel.reproduce.scales import TINY

VERDICT_CLASSES = {"reproduced": "reproduced", "not reproduced": "not", "undecided": ""}


@dataclass(frozen=True)
class Result:
    """name: the experiment; settings: what it was measured with (target, scale, questions, …); missing: what was left
    out, and why."""

    name: str
    settings: dict[str, Any]
    samples: Samples
    missing: dict[str, str]
    extra: dict[str, Any]

    def write(self, out: Path) -> Path:
        file = out / f"{self.name}.json"
        told = {"experiment": self.name, "settings": self.settings, "missing": self.missing, "extra": self.extra}
        write_json(file, {**told, "numbers": self.numbers(), "samples": self.samples.to_json()})
        return file

    def numbers(self) -> dict[str, Any]:
        """Every one of `intervals`, as JSON."""
        return {
            name: None if interval is None else {"value": interval.value, "ci95": interval.ci95}
            for name, interval in self.intervals()
        }

    def intervals(self) -> Iterator[tuple[str, Interval | None]]:
        """Every quantity with its interval, and speeds as multiples of vanilla's; None where nothing was tried."""
        for name in self.samples.columns:
            kind, method, *rest = name.split("/")
            base = "/".join((kind, VANILLA, *rest))
            if kind == SPEED and base in self.samples.columns:
                name, found = "/".join(("speedup", method, *rest)), self.samples.interval(ratio, (name, base))
            else:
                found = self.samples.interval(value, (name,))
            yield name, found if found is not None and math.isfinite(found.value) else None

    @classmethod
    def read(cls, out: Path, name: str) -> Result | None:
        """What an earlier run wrote; None if there is nothing. Raises `TercelError` for a file of another form."""
        file = out / f"{name}.json"
        if not file.is_file():
            return None
        found = read_json(file)
        try:
            samples = Samples.from_json(found["samples"])
            return cls(name, dict(found["settings"]), samples, dict(found["missing"]), dict(found["extra"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise TercelError(f"{file} holds no result of an experiment ({error!r}); move it away") from error


def write_page(result: Result, measured: Measured, judged: Sequence[Judged], out: Path) -> Path:
    """The experiment's page: question, plots and tables, claims, settings."""
    file = out / f"{result.name}.html"
    body = render(
        _template("page"),
        name=result.name,
        about=EXPERIMENTS[result.name].about,
        origin=EXPERIMENTS[result.name].origin,
        tiny=result.settings["scale"] == TINY,
        kinds={name.split("/")[0].rstrip("0123456789") for name in result.samples.columns},
        sections=[_section(*reports) for reports in measured.reports],
        legend=LEGEND,
        plots=list(_plots(result)),
        claims=_table(judged),
        numbers=[
            (in_words(name), with_interval(found, 3))
            for name, found in result.intervals()
            if not name.startswith(f"speedup/{VANILLA}/")  # 1
        ],
        missing=result.missing,
        settings=_settings({**result.settings, **_own(result.extra)}, EXPERIMENTS[result.name].tasks),
        source=paper.source(),
    )
    write_text(file, page(f"tercel reproduce {result.name}", body))
    return file


def write_claims(judged: Sequence[Judged], settings: Mapping[str, Any], out: Path) -> tuple[Path, Path]:
    """`claims.json` and `claims.html`."""
    write_json(out / "claims.json", [each.to_json() for each in judged])
    body = render(
        _template("claims"),
        claims=_table(judged),
        counts={name: sum(each.verdict == name for each in judged) for name in VERDICT_CLASSES},
        tiny=settings["scale"] == TINY,
        settings=_settings(settings),
        source=paper.source(),
    )
    write_text(out / "claims.html", page("tercel reproduce claims", body))
    return out / "claims.json", out / "claims.html"


def in_words(quantity: str) -> str:
    """`alpha3/eagle/T0` as a person would say it."""
    kind, method, *rest = quantity.split("/")
    told = {TAU: "τ", SPEED: "tokens a second"}.get(kind, kind)
    if kind.startswith("alpha"):
        told = f"{kind.removeprefix('alpha')}-α"
    return ", ".join([f"{told} of {method}", *map(_condition, rest)])


def _condition(end: str) -> str:
    """`T1`, `b8` or `1of4`."""
    if end.startswith("T"):
        return f"T={end[1:]}"
    if end.startswith("b"):
        return f"{end[1:]} at a time"
    return "all of the data" if end == "1of1" else f"1/{end.removeprefix('1of')} of the data"


_SETTINGS = {
    "weights": "fingerprint of its weights",
    "draft model": "fingerprint of the second model",
    "questions": "questions of each task",
    "max_new_tokens": "tokens of an answer at most",
    "seeds": "times a question is asked at temperature 1",
    "rounds": "rounds of every number of requests",
    "training": "training of every head",
    "heads": "heads that were given",
    "data": "what heads learned from",
}


def _settings(told: Mapping[str, Any], tasks: Sequence[str] | None = None) -> dict[str, str]:
    """Their values in words; nothing of those that are not there. tasks: those that were asked (None: all), whose
    digests are left to the JSON."""
    asked = [task for task in told["tasks"] if tasks is None or task in tasks] if "tasks" in told else []
    shown = {**told, "tasks": asked}
    return {_SETTINGS.get(name, name): _value(found) for name, found in shown.items() if found not in (None, {}, [])}


def _own(extra: Mapping[str, Any]) -> dict[str, Any]:
    """What an experiment has otherwise than the rest."""
    return {name: extra[name] for name in ("questions",) if name in extra}


def _value(found: Any) -> str:
    if isinstance(found, Mapping):
        return ", ".join(f"{name} {_value(value)}" for name, value in found.items())
    return ", ".join(map(str, found)) if isinstance(found, list) else str(found)


def _template(name: str) -> str:
    return (files("tercel.reproduce") / f"{name}.html").read_text("utf-8")


def _section(sized: BenchReport, fixed: BenchReport) -> dict[str, Any]:
    """Of one temperature. split_fixed: the time of a pass in the papers' trees, where those are others."""
    found = table_section(table1(sized, fixed), sized)
    return {**found, "split_fixed": None if fixed is sized else time_split(fixed)}


def _table(judged: Sequence[Judged]) -> Markup:
    """Nothing without a claim."""
    rows = [(each, with_interval(each.interval), VERDICT_CLASSES[each.verdict]) for each in judged]
    return render(_template("claims_table"), claims=rows) if rows else Markup("")


def _plots(result: Result) -> Iterator[tuple[str, Markup]]:
    """Of the experiments whose numbers lie on a line."""
    numbers = result.numbers()
    if result.name == "fig1":
        ticks = [(float(place), "all" if part == 1 else f"1/{part}") for place, part in enumerate(PARTS)]
        found = [
            Series(method, _points(numbers, [f"tau/{method}/1of{part}" for part in PARTS]))
            for method in ("eagle3", "eagle2")
        ]
        if any(series.points for series in found):
            yield "τ against the share of the data", lines(found, x="data", y="τ", ticks=ticks)
    elif result.name in ("fig4", "fig7"):
        yield from _alpha_plots(result, numbers)
    elif result.name == "parallel":
        yield from _throughput_bars(result)
    elif result.name == "table3":
        batches = result.extra["batches"]
        ticks = [(float(place), str(batch)) for place, batch in enumerate(batches)]
        names = list(dict.fromkeys(name.split("/")[1] for name in numbers))
        found = [
            Series(name, _points(numbers, [f"speedup/{name}/b{batch}" for batch in batches])) for name in names
        ]
        table = paper.numbers()["table3"]
        beside = dict(zip(table["batches"], table["eagle3"], strict=True))
        told = [(float(place), beside[b], None, None) for place, b in enumerate(batches) if b in beside]
        found.append(Series("paper's eagle3, on a GPU", told, dashed=True))
        yield "throughput over that without drafts", lines(found, x="requests at a time", y="times", ticks=ticks)


def _throughput_bars(result: Result) -> Iterator[tuple[str, Markup]]:
    """A plot for each number of requests at a time."""
    for batch in result.extra["batches"]:
        found = [
            Bar(name.split("/")[1], interval.value, with_interval(interval), interval.ci95)
            for name, interval in result.intervals()
            if interval is not None and name.endswith(f"/b{batch}") and name.split("/")[1] != VANILLA
        ]
        yield f"throughput over that without drafts, {batch} at a time", bars(found, one=True)


def _alpha_plots(result: Result, numbers: Mapping[str, Any]) -> Iterator[tuple[str, Markup]]:
    depth = result.extra["depth"]
    ticks = [(float(n), str(n)) for n in range(depth)]
    for temperature in result.extra["temperatures"]:
        end = f"T{temperature:g}"
        names = list(dict.fromkeys(n.split("/")[1] for n in numbers if n.endswith(f"/{end}")))
        found = [
            Series(name, _points(numbers, [f"alpha{n}/{name}/{end}" for n in range(depth)])) for name in names
        ]
        if result.name == "fig7" and temperature == 0:
            figure = paper.numbers()["fig7"]
            for name in ("eagle", "eagle3"):
                pairs = zip(figure["n"], figure[name], strict=True)
                points = [(float(n), rate, None, None) for n, rate in pairs if n < depth]
                found.append(Series(f"paper's {name}", points, dashed=True))
        title = f"share of right drafts after n of the head's own outputs, {end.replace('T', 'T=')}"
        yield title, lines(found, x="n", y="n-α", ticks=ticks, zero=True)


def _points(
    numbers: Mapping[str, Any], names: Sequence[str]
) -> list[tuple[float, float, float | None, float | None]]:
    """At the places of these names, those that were measured."""
    points: list[tuple[float, float, float | None, float | None]] = []
    for place, name in enumerate(names):
        found = numbers.get(name)
        if found is not None:
            low, high = found["ci95"] or (None, None)
            points.append((float(place), found["value"], low, high))
    return points
