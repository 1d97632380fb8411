"""τ against training tokens: power law and saturating form fitted to measured runs, and what a run would reach.

Both forms are linear in all but one number, the exponent: for every exponent of a grid the others follow by least
squares, so that no fit depends on where it began. Intervals are of a parametric bootstrap: points are drawn about the
curve as far off as the measured ones are, which few points tell only roughly, so that distance is drawn too (by its
chi-square distribution: for a straight line this is Student's interval), and the fit is repeated. What all points share
(the held-out conversations, the machine, the seed) is not in it.

Shape legend: P points, E exponents of the grid, R resamples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tercel.errors import TercelError
from tercel.measure.intervals import Interval

POWER, SATURATING = "power", "saturating"
PARAMETERS = {POWER: 2, SATURATING: 3}
RESAMPLES = 1000
_GRIDS = {POWER: np.geomspace(0.01, 2.0, 400), SATURATING: np.geomspace(0.02, 4.0, 400)}


@dataclass(frozen=True)
class Point:
    """A run that was measured: training tokens (of one kind throughout a fit), and held-out τ."""

    tokens: float
    tau: float


@dataclass(frozen=True)
class Curve:
    """power: `1 + scale * x**exponent`, since τ is 1 without a head; saturating: `limit - scale * x**-exponent`; x is
    tokens over `unit`."""

    form: str
    unit: float
    scale: float
    exponent: float
    limit: float | None = None

    def at(self, tokens: float) -> float:
        x = tokens / self.unit
        if self.limit is None:
            return 1.0 + self.scale * x**self.exponent
        return max(1.0, self.limit - self.scale * x**-self.exponent)


@dataclass(frozen=True)
class Fit:
    """A form fitted to points. curves: of the resamples, and spreads `[R]`: the standard deviation of a run about each;
    none of as few points as the form has numbers. aic: Akaike's criterion, lower is better; ahead: root mean square
    error of points beyond those fitted (`_ahead`), None of too few points."""

    points: tuple[Point, ...]
    curve: Curve
    curves: tuple[Curve, ...]
    spreads: tuple[float, ...]
    aic: float
    ahead: float | None

    def predict(self, tokens: float) -> Interval:
        """τ of a run that is to come, with a 95 % interval: of the curve, and of a run about it; NaN if unknown."""
        value = self.curve.at(tokens)
        if not self.curves:
            return Interval(value, math.nan, math.nan)
        drawn = np.array([curve.at(tokens) for curve in self.curves])
        drawn += np.random.default_rng(1).normal(0.0, self.spreads)
        low, high = np.quantile(drawn, [0.025, 0.975])
        return Interval(value, max(1.0, min(float(low), value)), max(float(high), value))

    def parameters(self) -> dict[str, Interval]:
        """Scale at the curve's unit, exponent and limit, with their 95 % intervals."""
        names = ("scale", "exponent", *(("limit",) if self.curve.limit is not None else ()))
        found = {}
        for name in names:
            drawn = [getattr(curve, name) for curve in self.curves] or [math.nan]
            low, high = np.quantile(drawn, [0.025, 0.975])
            found[name] = Interval(getattr(self.curve, name), float(low), float(high))
        return found


def fit(points: Sequence[Point], form: str, *, resamples: int = RESAMPLES, seed: int = 0) -> Fit:
    """Fit `form` to the points.

    Raises `TercelError` for fewer points than the form has numbers, tokens that are not positive, or a τ below 1.
    """
    known = tuple(sorted(points, key=lambda point: point.tokens))
    _check(known, form)
    tokens, taus = np.array([p.tokens for p in known]), np.array([p.tau for p in known])
    unit = float(np.exp(np.log(tokens).mean()))
    (curve,) = _fit_all(tokens / unit, taus[None], form, unit)
    fitted = np.array([curve.at(t) for t in tokens])
    free = len(known) - PARAMETERS[form]
    off = float(((taus - fitted) ** 2).sum())
    curves, spreads = [], np.zeros(0)
    if free > 0:
        rng = np.random.default_rng(seed)
        spreads = np.sqrt(off / rng.chisquare(free, resamples))
        drawn = fitted + spreads[:, None] * rng.normal(size=(resamples, len(known)))
        curves = _fit_all(tokens / unit, drawn, form, unit)
    aic = len(known) * math.log(max(off / len(known), 1e-12)) + 2 * (PARAMETERS[form] + 1)
    return Fit(known, curve, tuple(curves), tuple(spreads.tolist()), aic, _ahead(known, form))


def choose(points: Sequence[Point]) -> tuple[Fit, Fit | None]:
    """The form that the points prefer, and the other one if there are enough points for it.

    Preferred is what predicts better the points that lie beyond those it was fitted to, which is what a forecast is;
    where there are too few points for that, the power law. Raises `TercelError` as `fit`.
    """
    power = fit(points, POWER)
    if len(points) <= PARAMETERS[SATURATING]:
        return power, None
    saturating = fit(points, SATURATING)
    if power.ahead is None or saturating.ahead is None or power.ahead <= saturating.ahead:
        return power, saturating
    return saturating, power


def _ahead(points: tuple[Point, ...], form: str) -> float | None:
    """Fit all but the last points, from one more than the largest form needs on, and predict the next."""
    least = max(PARAMETERS.values()) + 1
    errors = []
    for count in range(least, len(points)):
        tokens, taus = np.array([p.tokens for p in points[:count]]), np.array([p.tau for p in points[:count]])
        unit = float(np.exp(np.log(tokens).mean()))
        (curve,) = _fit_all(tokens / unit, taus[None], form, unit)
        errors.append(curve.at(points[count].tokens) - points[count].tau)
    return math.sqrt(sum(error**2 for error in errors) / len(errors)) if errors else None


def _fit_all(x: np.ndarray, taus: np.ndarray, form: str, unit: float) -> list[Curve]:
    """The best curves for `taus` `[R, P]` at `x` `[P]`."""
    exponents = _GRIDS[form]
    best = np.full(len(taus), np.inf)
    scale, exponent, limit = np.zeros(len(taus)), np.full(len(taus), exponents[0]), taus.max(1)
    for candidate in exponents:
        if form == POWER:
            basis = x**candidate
            a = np.maximum((taus - 1) @ basis / (basis @ basis), 0.0)
            c = np.ones(len(taus))
            found = c[:, None] + a[:, None] * basis
        else:
            basis = x**-candidate
            centred = basis - basis.mean()
            a = np.maximum(-(taus @ centred) / (centred @ centred), 0.0)
            c = taus.mean(1) + a * basis.mean()
            found = c[:, None] - a[:, None] * basis
        squares = ((taus - found) ** 2).sum(1)
        better = squares < best
        best[better], scale[better], exponent[better], limit[better] = squares[better], a[better], candidate, c[better]
    limits: list[float | None] = [None] * len(taus) if form == POWER else limit.tolist()
    return [
        Curve(form, unit, *numbers) for numbers in zip(scale.tolist(), exponent.tolist(), limits, strict=True)
    ]


def _check(points: tuple[Point, ...], form: str) -> None:
    if len({point.tokens for point in points}) < PARAMETERS[form]:
        raise TercelError(
            f"{len(points)} points are too few for the {form} form, which has {PARAMETERS[form]} numbers; measure more"
        )
    for point in points:
        if not (0 < point.tokens < math.inf and 1 <= point.tau < math.inf):
            raise TercelError(
                f"a point of {point.tokens} tokens and τ {point.tau} cannot be fitted; "
                "tokens are positive, τ at least 1"
            )
