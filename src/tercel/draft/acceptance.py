"""The two numbers of the papers on drafting, each made in this one place (spec section 10).

τ, acceptance length: tokens that one forward of the target yields on average, its own included; 1 without drafts. The
first token of an answer is prefill's, so that neither it nor its forward counts.

n-α: of chains, the share of drafts at depth `n`, made of `n` of the head's own outputs, that are right where all before
them were. Which drafts of a chain are right is told by one number, how many are right before the first wrong one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

import torch
from torch import Tensor


@dataclass(frozen=True)
class NAlpha:
    """Counts over chains; right[n]: drafts at depth `n` that were right where all before were, seen[n]: how many were
    tried there. So right[n] also counts the chains whose first `n + 1` drafts were all right."""

    right: tuple[int, ...]
    seen: tuple[int, ...]

    @property
    def alpha(self) -> tuple[float | None, ...]:
        """n-α for n = 0, 1, …; None where no draft was ever tried."""
        return tuple(right / seen if seen else None for right, seen in zip(self.right, self.seen, strict=True))


def count_chains(accepted: Tensor | Sequence[int], room: Tensor | Sequence[int], depth: int) -> NAlpha:
    """Count chains of `depth` drafts.

    accepted int `[C]`: right drafts of each chain before its first wrong one; room int `[C]`: how many of its drafts
    were compared with anything, since an answer may end before its last chain does.
    """
    accepted, room = (torch.as_tensor(values, dtype=torch.long)[:, None] for values in (accepted, room))
    places = torch.arange(depth)
    tried = (accepted >= places) & (room > places)
    right = tried & (accepted > places)
    return NAlpha(tuple(right.sum(0).tolist()), tuple(tried.sum(0).tolist()))


def tokens_of_steps(answer: Sequence[int] | int) -> int:
    """How many tokens of an answer (or of one with so many) its steps yielded: all but prefill's."""
    return (answer if isinstance(answer, int) else len(answer)) - 1


def acceptance_length(tokens: int, steps: int) -> float:
    """τ of `steps` forwards of the target that yielded `tokens` (`tokens_of_steps`); 1 where there was none."""
    return tokens / steps if steps else 1.0


def joint(alpha: Iterable[float]) -> tuple[float, ...]:
    """The chances that the first draft, the first two, … are all right, of n-α for n = 0, 1, …"""
    return tuple(accumulate(alpha, mul))
