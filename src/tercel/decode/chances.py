"""How likely a drafted token is to be accepted, learned from the trees that were verified.

A head's own probability `q` is no promise: at temperature 0 the target takes its best token, which a sure head is
surer to hit than `q` says, and above it every depth is wrong in its own way. So outcomes are counted by `q`, depth and
regime (greedy, sampled), and a rising map is laid through them; where little was seen it is the identity. Drafts of
which no `q` is told are counted by depth and place among their siblings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tercel.decode.rising import Floats, rising
from tercel.errors import TercelError

Ints = NDArray[np.int64]

DEPTHS = 4  # told apart where `q` is known; the last stands for all below
FAR, PLACES = 16, 4  # depths and places among siblings where it is not
KNOTS = np.linspace(-7.5, 7.5, 16)  # middles of the bins, log(q / (1 - q))
PRIOR = 8.0  # outcomes that the identity is worth, and then what all depths have in common
UNKNOWN = 0.5  # before anything is seen, of the first sibling where no `q` is told; the next have half of that
MEMORY = 4000.0  # outcomes of a bin, beyond which older ones fade
BLIND_MEMORY = 200.0  # the same where no `q` is told: one text has what another lacks
EVERY = 16  # outcomes between two fits
_LEAST, _MOST = -np.log1p(np.exp(-KNOTS[[0, -1]]))  # log q at the ends of the bins


class Chances:
    """seen: outcomes `[regime, depth, bin]`; hit: those accepted; at: sums of the logits of their `q`."""

    def __init__(self) -> None:
        self.seen, self.hit, self.at = (np.zeros((2, DEPTHS, len(KNOTS))) for _ in range(3))
        self.blind_seen, self.blind_hit = (np.zeros((2, FAR, PLACES)) for _ in range(2))
        self._curves: dict[tuple[bool, int], tuple[Floats, Floats]] = {}
        self._news = 0

    @property
    def outcomes(self) -> float:
        return float(self.seen.sum() + self.blind_seen.sum())

    def of(self, log_q: Floats, depth: int, sampled: bool) -> Floats:
        """The chance that the target takes a token of probability exp(`log_q`), if it took all above it."""
        at, logits = self._curve(sampled, min(depth, DEPTHS) - 1)
        return _chance(np.interp(_logit(log_q), at, logits))

    def blind(self, depth: int, place: int, sampled: bool) -> float:
        """The same of a token of which nothing is told, at its place among siblings."""
        depth, place = min(depth, FAR) - 1, min(place, PLACES - 1)
        prior = UNKNOWN / (1 << place)
        seen, hit = self.blind_seen[int(sampled), depth, place], self.blind_hit[int(sampled), depth, place]
        return float((hit + PRIOR * prior) / (seen + PRIOR))

    def learn(self, log_q: Floats, depths: Ints, accepted: NDArray[np.bool_], sampled: bool) -> None:
        """Outcomes of drafted tokens whose parents were accepted."""
        if not len(log_q):
            return
        logits = _logit(log_q)
        bins = np.rint((logits - KNOTS[0]) / (KNOTS[1] - KNOTS[0])).astype(int)
        where = (np.minimum(depths, DEPTHS) - 1) * len(KNOTS) + bins
        for table, values in ((self.seen, None), (self.hit, accepted), (self.at, logits)):
            news = np.bincount(where, values, DEPTHS * len(KNOTS))
            table[int(sampled)] += news.reshape(DEPTHS, -1)
        fading = np.maximum(1.0, self.seen / MEMORY)
        for table in (self.hit, self.at, self.seen):
            table /= fading
        self._news += len(log_q)
        if self._news >= EVERY:
            self._curves, self._news = {}, 0

    def learn_blind(self, depth: int, place: int, accepted: bool, sampled: bool) -> None:
        where = int(sampled), min(depth, FAR) - 1, min(place, PLACES - 1)
        if self.blind_seen[where] >= BLIND_MEMORY:
            self.blind_seen[where] /= 2
            self.blind_hit[where] /= 2
        self.blind_seen[where] += 1
        self.blind_hit[where] += accepted

    def _curve(self, sampled: bool, depth: int) -> tuple[Floats, Floats]:
        """Where the bins lie and the logits of their chances: rising, and the identity where nothing was seen."""
        known = self._curves.get((sampled, depth))
        if known is None:
            seen, hit, at = (table[int(sampled)] for table in (self.seen, self.hit, self.at))
            own = (at.sum(0) + PRIOR * KNOTS) / (seen.sum(0) + PRIOR)
            common = (hit.sum(0) + PRIOR * _chance(own)) / (seen.sum(0) + PRIOR)
            where = (at[depth] + PRIOR * own) / (seen[depth] + PRIOR)
            chance = (hit[depth] + PRIOR * common) / (seen[depth] + PRIOR)
            fit = rising(chance, seen[depth] + PRIOR)
            known = self._curves[sampled, depth] = (where, _logit(np.log(fit)))
        return known

    def to_json(self) -> dict[str, Any]:
        tables = {"seen": self.seen, "hit": self.hit, "at": self.at}
        return {name: np.round(table, 3).tolist() for name, table in tables.items()}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Chances:
        """Raises `TercelError` for what `to_json` did not write."""
        chances = cls()
        try:
            tables = [np.array(value[name], dtype=float) for name in ("seen", "hit", "at")]
        except (LookupError, TypeError, ValueError) as error:
            raise TercelError(f"this is no record of outcomes: {error}; remove the file") from error
        seen, hit, at = tables
        fine = all(table.shape == chances.seen.shape and np.isfinite(table).all() for table in tables)
        if not fine or (seen < 0).any() or (hit < 0).any() or (hit > seen + 1e-2).any():
            raise TercelError("this is no record of outcomes: the numbers do not fit each other; remove the file")
        chances.seen, chances.hit, chances.at = seen, hit, at
        return chances


def expected_calibration_error(chances: Sequence[float] | Floats, accepted: Sequence[bool] | Floats) -> float:
    """The mean gap between chance and outcome over ten bins of equal width, weighted by how much is in each."""
    chance, outcome = np.asarray(chances, float), np.asarray(accepted, float)
    if not len(chance):
        return 0.0
    bins = np.minimum((chance * 10).astype(int), 9)
    gaps = [abs(float((chance[bins == b] - outcome[bins == b]).sum())) for b in range(10)]
    return sum(gaps) / len(chance)


def _logit(log_q: Floats) -> Floats:
    log_q = np.fmin(np.fmax(log_q, _LEAST), _MOST)  # which take the other one of a NaN
    return log_q - np.log1p(-np.exp(log_q))


def _chance(logits: Floats) -> Floats:
    return 1 / (1 + np.exp(-logits))
