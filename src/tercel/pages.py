"""Pages that are one file: style and plots within, nothing fetched, dark and light, for a phone and for a desk.

`page` makes a page of a body; `bars`, `stack` and `lines` are plots for it. What is given as text is escaped; `Markup`
is taken as it is. Colours are the style sheet's, so that plots follow its dark and its light ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from jinja2 import Environment
from markupsafe import Markup

PARTS = Path(__file__).with_name("page_parts")
COLOURS_FILE = PARTS / "colours.css"  # of every page, in this room or another
COLOURS = 8  # of the style sheet, --c0 to --c7
WIDE, NARROW, HEIGHT = 760, 340, 300  # of a plot, in its own units: on a desk and on a phone


@cache
def environment() -> Environment:
    """Of all templates of pages: everything is escaped."""
    return Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)


def page(title: str, body: Markup) -> str:
    """The whole page. body: what `render` gave."""
    style = Markup(_read(COLOURS_FILE.name) + _read("style.css"))
    return _part("page", title=title, style=style, body=body) + "\n"


def render(template: str, **values: object) -> Markup:
    """A part of a page of a Jinja template."""
    return Markup(environment().from_string(template).render(**values))


def _part(file: str, /, **values: object) -> Markup:
    """One of the package's own templates."""
    return render(_read(f"{file}.html"), **values)


@cache
def _read(name: str) -> str:
    return (PARTS / name).read_text("utf-8")


@dataclass(frozen=True)
class Bar:
    """text: the number as it is written behind the bar; ci95: low and high; beside: another's number, marked on the
    same scale; base: what the others are compared with."""

    name: str
    value: float
    text: str
    ci95: Sequence[float] | None = None
    beside: float | None = None
    base: bool = False


def bars(found: Sequence[Bar], *, one: bool = False) -> Markup:
    """A bar a line from 0 on. one: a dashed line at 1."""
    tops = [bar.value for bar in found] + [bar.ci95[1] for bar in found if bar.ci95]
    most = max([*tops, *(bar.beside for bar in found if bar.beside is not None), 1e-9]) * 1.03
    return _part("bars", bars=found, one=one, at=lambda value: f"{100 * max(0.0, min(value / most, 1.0)):.2f}%")


def stack(parts: Sequence[str], rows: Sequence[tuple[str, Sequence[float], str]]) -> Markup:
    """Bars of several parts. rows: name, a number a part, and the text behind."""
    most = max([*(sum(values) for _, values, _ in rows), 1e-9]) * 1.01
    return _part(
        "stack",
        key=_key([(part, False) for part in parts]),
        parts=parts,
        rows=rows,
        colours=COLOURS,
        at=lambda value: f"{100 * value / most:.2f}%",
    )


@dataclass(frozen=True)
class Series:
    """points: x, y, and the low and high end of its interval where there is one. dashed: for what is not measured
    here."""

    name: str
    points: Sequence[tuple[float, float, float | None, float | None]]
    dashed: bool = False


def lines(
    series: Sequence[Series], *, x: str, y: str, ticks: Sequence[tuple[float, str]], zero: bool = False
) -> Markup:
    """Lines with bands, once for a desk and once for a phone. ticks: of the x axis, which they span. zero: y from 0."""
    key = _key([(s.name, s.dashed) for s in series])
    drawn = [_svg(series, x, y, ticks, zero, width, name) for width, name in ((WIDE, "wide"), (NARROW, "narrow"))]
    return Markup("<figure>{}{}{}</figure>\n").format(key, *drawn)


def _key(series: Sequence[tuple[str, bool]]) -> Markup:
    """Which colour is whose: names, and whether they are dashed."""
    return _part("key", series=series, colours=COLOURS)


def _svg(
    series: Sequence[Series],
    x: str,
    y: str,
    ticks: Sequence[tuple[float, str]],
    zero: bool,
    width: int,
    name: str,
) -> Markup:
    values = [v for s in series for point in s.points for v in point[1:] if v is not None]
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    if zero:
        low = min(0.0, low)
    marks = nice_ticks(low, high)
    left, right, top, bottom = 52, 14, 26, 48
    first, last = ticks[0][0], ticks[-1][0]

    def at_x(value: float) -> float:
        return left + (width - left - right) * (value - first) / ((last - first) or 1.0)

    def at_y(value: float) -> float:
        return HEIGHT - bottom - (HEIGHT - top - bottom) * (value - marks[0]) / ((marks[-1] - marks[0]) or 1.0)

    return _part(
        "lines",
        **{"name": name, "width": width, "height": HEIGHT, "left": left, "right": width - right, "x": x, "y": y},
        ticks=[(at_x(value), text) for value, text in ticks],
        marks=[(at_y(value), f"{value:g}") for value in marks],
        curves=[
            {
                "colour": place % COLOURS,
                "dashed": s.dashed,
                "points": [(at_x(p[0]), at_y(p[1])) for p in s.points],
                "band": _band([(at_x(p[0]), at_y(p[2]), at_y(p[3])) for p in s.points if None not in p]),  # type: ignore[arg-type]
            }
            for place, s in enumerate(series)
        ],
    )


def _band(points: Sequence[tuple[float, float, float]]) -> list[tuple[float, float]]:
    return [(x, low) for x, low, _ in points] + [(x, high) for x, _, high in reversed(points)]


def nice_ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from at most `low` to at least `high`, evenly apart."""
    span = max(high - low, 1e-3 * max(abs(high), 1e-3))
    raw = span / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999)
    start, end = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(place * step, 10) for place in range(start, max(end, start + 1) + 1)]
