"""Goodness of fit: is this sample drawn from that distribution? (No p-value below is exact for tiny samples;
the callers keep expected counts at 5 or more.)"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from tercel.errors import TercelError

MIN_EXPECTED = 5.0  # the usual bound for a cell of a chi-square test


def chi_square_tail(statistic: float, df: int) -> float:
    """P(chi-square with `df` degrees of freedom >= `statistic`); 1 without a degree of freedom."""
    if df < 1:
        return 1.0
    half = torch.tensor([df / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def normal_tails(z: float) -> float:
    """P(a standard normal is at least as far from 0 as `z`)."""
    return math.erfc(abs(z) / math.sqrt(2))


def chi_square(observed: NDArray[np.float64], expected: NDArray[np.float64]) -> tuple[float, int]:
    """Statistic and degrees of freedom of counts `[C]` against expected counts `[C]` of the same total.

    Cells that expect less than `MIN_EXPECTED` share one, together with the smallest others if it is still too
    small. A count in a cell that expects 0 is the caller's to judge, and is left out here.
    """
    possible = expected > 0
    observed, expected = observed[possible], expected[possible]
    order = np.argsort(expected, kind="stable")
    observed, expected = observed[order], expected[order]
    pooled = int((expected < MIN_EXPECTED).sum())
    if pooled:
        short = np.cumsum(expected) < MIN_EXPECTED
        pooled = min(max(pooled, int(short.sum()) + 1), len(expected))
        observed = np.concatenate([[observed[:pooled].sum()], observed[pooled:]])
        expected = np.concatenate([[expected[:pooled].sum()], expected[pooled:]])
    if len(expected) < 2:
        return 0.0, 0
    return float(((observed - expected) ** 2 / expected).sum()), len(expected) - 1


def ks_uniform(values: Sequence[float]) -> float:
    """Kolmogorov-Smirnov p-value of values in [0, 1] against the uniform (asymptotic, Stephens'
    correction)."""
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    n = len(ordered)
    if not n:
        raise TercelError("there is nothing to test: no token was sampled")
    steps = np.arange(n + 1) / n
    distance = max(float((steps[1:] - ordered).max()), float((ordered - steps[:-1]).max()))
    scaled = (math.sqrt(n) + 0.12 + 0.11 / math.sqrt(n)) * distance
    if scaled < 0.3:
        return 1.0  # the series converges slowly there, and the tail is 1 to five digits
    terms = (2 * (-1) ** (j - 1) * math.exp(-2 * (j * scaled) ** 2) for j in range(1, 101))
    return min(1.0, max(0.0, sum(terms)))


def chi_square_uniform(values: Sequence[float], most_cells: int = 50) -> float:
    """Chi-square p-value of values in [0, 1] against the uniform, in equal cells: sees what KS's single
    largest distance does not."""
    cells = min(most_cells, int(len(values) // (2 * MIN_EXPECTED)))
    if cells < 2:
        return 1.0
    counts = np.histogram(values, bins=cells, range=(0.0, 1.0))[0].astype(np.float64)
    statistic, df = chi_square(counts, np.full(cells, len(values) / cells))
    return chi_square_tail(statistic, df)


def randomised_pit(probs: NDArray[np.float64], token: int, uniform: float) -> float:
    """Probability integral transform of `token` under `probs` `[V]`, sorted from the most probable (ties:
    lower id first): uniform in [0, 1] if and only if the token is drawn from `probs`, given an independent
    `uniform`.

    Sorted, because a faulty acceptance rule favours or shuns the probable tokens, and then all shifts add up.
    """
    mass = float(probs[token])
    ahead = probs > mass
    ahead[:token] |= probs[:token] == mass
    return min(1.0, float(probs[ahead].sum()) + uniform * mass)


def combine(p_values: Mapping[str, float]) -> float:
    """One p-value of several tests on the same data: the smallest times their number (Bonferroni; Holm's
    first step), valid however the tests depend on each other."""
    return min(1.0, len(p_values) * min(p_values.values()))
