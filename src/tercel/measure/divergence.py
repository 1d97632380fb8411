"""Where two answers part, and what is known of the place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from tercel.decode.history import TokenHistory
from tercel.errors import TercelError
from tercel.measure.tasks import Prompt
from tercel.target_model.protocol import TargetModel

Progress = Callable[[int, int], None]
Verdict = Literal["numerical", "WRONG"]
BATCH = 16  # prompts handed to an engine at a time: enough to fill its slots, few enough to show progress


def counting_from(before: int, total: int, progress: Progress) -> Progress:
    """Of a part of something larger: what is done in it comes on top of what was done before."""
    return lambda done, _: progress(before + done, total)


@dataclass(frozen=True)
class Divergence:
    """Where a drafted answer first leaves token-by-token decoding.

    position: index of the generated token. token_draft, token_vanilla: None for an answer that ended there.
    top2_gap: between the target's two best logits there, after penalties (of sampled text: how far the random
    number lies from the border between the two tokens, in probability). gap: how far the worse of the two
    tokens lies below the best. noise: how much rounding moves such gaps. verdict: "numerical" only if `gap <=
    noise`.
    """

    id: str
    position: int
    token_draft: int | None
    token_vanilla: int | None
    top2_gap: float
    gap: float
    noise: float
    verdict: Verdict


@dataclass(frozen=True)
class SameText:
    """Answers compared with token-by-token decoding, each up to its first divergence."""

    sequences: int
    tokens: int
    divergences: tuple[Divergence, ...]

    @property
    def ok(self) -> bool:
        """No divergence but what rounding explains."""
        return all(divergence.verdict == "numerical" for divergence in self.divergences)

    @property
    def identical(self) -> int:
        """How many answers are the same, token by token."""
        return self.sequences - len(self.divergences)

    def to_json(self) -> dict[str, Any]:
        return {
            "sequences": self.sequences,
            "identical": self.identical,
            "tokens": self.tokens,
            "divergences": [asdict(divergence) for divergence in self.divergences],
            "ok": self.ok,
        }


def require_prompts(prompts: Sequence[Prompt]) -> None:
    if not prompts:
        raise TercelError("a check of losslessness needs at least one prompt")


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Index of the first token that differs or is missing on one side; None if equal."""
    for index, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            return index
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))


def history_of(target: TargetModel, prompt: Prompt, generated: Sequence[int]) -> TokenHistory:
    history = TokenHistory(prompt.tokens, target.vocab_size)
    for token in generated:
        history.push(token)
    return history
