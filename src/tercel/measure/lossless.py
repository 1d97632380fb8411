"""The proof behind `tercel verify`: drafted decoding against token-by-token decoding and against the target
itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tercel.measure.divergence import Divergence
from tercel.measure.greedy import GreedyCheck, check_greedy
from tercel.measure.same_seed import SameSeedCheck
from tercel.measure.sampled import SampledCheck, check_sampled

__all__ = [
    "Divergence",
    "GreedyCheck",
    "SameSeedCheck",
    "SampledCheck",
    "VerifyReport",
    "check_greedy",
    "check_sampled",
]


@dataclass(frozen=True)
class VerifyReport:
    """Both checks, or one of them. weights: the target's, if they are not its own; it is what text is compared with.
    lossy: the rule by which drafts were accepted, if that changes the text: then no check that is passed helps."""

    greedy: GreedyCheck | None
    sampled: SampledCheck | None
    weights: str | None = None
    lossy: str | None = None

    @property
    def ok(self) -> bool:
        """Whether every check that ran was passed, by a rule that promises so; False if none ran."""
        checks = [check for check in (self.greedy, self.sampled) if check is not None]
        return self.lossy is None and bool(checks) and all(check.ok for check in checks)

    def to_json(self) -> dict[str, Any]:
        return {
            "greedy": None if self.greedy is None else self.greedy.to_json(),
            "sampled": None if self.sampled is None else self.sampled.to_json(),
            "weights": self.weights,
            "lossy": self.lossy,
            "ok": self.ok,
        }
