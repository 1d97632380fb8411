"""Whether drafting pays lately, and when to look again where it does not."""

from __future__ import annotations

from dataclasses import dataclass

NEWS, MOST = 1 / 16, 1 / 4  # share of a step in what drafting brings: of one row, and at most, also of a trial
PAUSE, LONGEST_PAUSE = 4, 64  # steps without drafts before the next trial: the first time, and by doubling at most
TRIALS = 1 / 50  # share of the time that trials may take, so that dear ones come more rarely still


@dataclass
class Gate:
    """Of steps of about so many rows, which together say more than one. gain: tokens a row that drafting brings, beyond
    what it costs."""

    gain: float = 0.25
    rows: int = 1
    _pause: int = PAUSE
    _left: int = 0

    @property
    def idle(self) -> bool:
        """Whether drafting does not pay, so that only a trial is made now and then."""
        return self.gain < 0

    def opens(self) -> bool:
        """A step begins; returns whether anything is to be drafted."""
        idle = self.idle
        self._left -= idle
        return not idle or self._left < 0

    def learn(self, gain: float, cost: float) -> None:
        """A step with drafts gave so many tokens a row more than steps without would have given in its time; it took
        `cost` of such steps longer than one of them."""
        idle = self.idle
        self.gain += (MOST if idle else min(MOST, NEWS * self.rows)) * (min(max(gain, -1.0), 2.0) - self.gain)
        if not self.idle:
            self._pause = PAUSE
        else:
            self._pause = min(2 * self._pause, LONGEST_PAUSE) if idle else PAUSE
            self._left = max(self._pause, round(cost / TRIALS))
