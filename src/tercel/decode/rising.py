"""What can only rise, seen through noise."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def rising(values: Floats, weights: Floats) -> Floats:
    """The nearest sequence that never falls (pool adjacent violators)."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, how many
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        count = 1
        while pools and pools[-1][0] > value:
            mean, heavy, before = pools.pop()
            value = (mean * heavy + value * weight) / (heavy + weight)
            weight, count = weight + heavy, count + before
        pools.append((value, weight, count))
    return np.repeat([mean for mean, _, _ in pools], [count for _, _, count in pools])
