"""The proof behind `tercel verify`: drafted decoding against token-by-token decoding and against the target itself.

Greedy: the token ids must be equal; where they part, the target's logits are recomputed in several shapes, and only
a tie that rounding can turn is excused. Sampled: see `sampled.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch

from tercel.decode.sampling import SamplingParams, TokenHistory, processed_logits
from tercel.decode.types import Request
from tercel.errors import TercelError
from tercel.measure.methods import Generator
from tercel.measure.rounding import run_shapes
from tercel.measure.tasks import Prompt
from tercel.target.model import Target

Progress = Callable[[int, int], None]
Verdict = Literal["numerical", "WRONG"]
BATCH = 16  # prompts handed to an engine at a time: enough to fill its slots, few enough to show progress


@dataclass(frozen=True)
class Divergence:
    """Where a drafted answer first leaves token-by-token decoding.

    position: index of the generated token. token_draft, token_vanilla: None for an answer that ended there.
    top2_gap: between the target's two best logits there, after penalties (of sampled text: how far the random number
    lies from the border between the two tokens, in probability). gap: how far the worse of the two tokens lies below
    the best. noise: how much rounding moves such gaps. verdict: "numerical" only if `gap <= noise`.
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
class GreedyCheck:
    """sequences, tokens: how many were compared, each sequence up to its first divergence."""

    sequences: int
    tokens: int
    divergences: tuple[Divergence, ...]

    @property
    def ok(self) -> bool:
        """No divergence but what rounding explains."""
        return all(divergence.verdict == "numerical" for divergence in self.divergences)

    def to_json(self) -> dict[str, Any]:
        return {
            "sequences": self.sequences,
            "tokens": self.tokens,
            "divergences": [asdict(divergence) for divergence in self.divergences],
            "ok": self.ok,
        }


@torch.no_grad()
def check_greedy(
    target: Target,
    drafted: Generator,
    vanilla: Generator,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    progress: Progress = lambda done, total: None,
) -> GreedyCheck:
    """Answer every prompt with both engines at temperature 0 and compare token by token.

    Raises `TercelError` for a temperature above 0 or without a prompt.
    """
    if not params.greedy:
        raise TercelError(f"the greedy check runs at temperature 0, not {params.temperature}")
    require_prompts(prompts)
    tokens, divergences = 0, []
    for start in range(0, len(prompts), BATCH):
        batch = prompts[start : start + BATCH]
        requests = [Request(prompt.tokens, params) for prompt in batch]
        answers = zip(drafted.generate(requests), vanilla.generate(requests), strict=True)
        for prompt, (ours, theirs) in zip(batch, answers, strict=True):
            at = first_difference(ours.tokens, theirs.tokens)
            tokens += len(theirs.tokens) if at is None else at
            if at is not None:
                divergences.append(judge_greedy(target, prompt, ours.tokens, theirs.tokens, at, params))
        progress(start + len(batch), len(prompts))
    return GreedyCheck(len(prompts), tokens, tuple(divergences))


def require_prompts(prompts: Sequence[Prompt]) -> None:
    if not prompts:
        raise TercelError("a check of losslessness needs at least one prompt")


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Index of the first token that differs or is missing on one side; None if equal."""
    for index, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            return index
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))


def judge_greedy(
    target: Target,
    prompt: Prompt,
    ours: Sequence[int],
    theirs: Sequence[int],
    at: int,
    params: SamplingParams,
) -> Divergence:
    """Whether rounding can have turned token `at`: both tokens must be within the measured noise of the best.

    An answer that ended where the other went on is never rounding: its tokens up to there are the same.
    """
    prefix = theirs[:at]
    shapes = run_shapes(target, prompt.tokens, prefix)
    history = history_of(target, prompt, prefix)
    scores = processed_logits(shapes.last[0], params, history)
    best = scores.topk(2).values
    both = [tokens[at] for tokens in (ours, theirs) if at < len(tokens)]
    gap = float(best[0] - scores[both].min())
    # a repetition penalty below 1, or above, scales the logits and with them their rounding
    noise = shapes.gap_noise() * max(params.repetition_penalty, 1 / params.repetition_penalty)
    numerical = len(both) == 2 and gap <= noise
    return Divergence(
        id=prompt.id,
        position=at,
        token_draft=ours[at] if at < len(ours) else None,
        token_vanilla=theirs[at] if at < len(theirs) else None,
        top2_gap=float(best[0] - best[1]),
        gap=gap,
        noise=noise,
        verdict="numerical" if numerical else "WRONG",
    )


def history_of(target: Target, prompt: Prompt, generated: Sequence[int]) -> TokenHistory:
    history = TokenHistory(prompt.tokens, target.vocab_size, target.device)
    for token in generated:
        history.push(token)
    return history


def with_seed(params: SamplingParams, seed: int) -> SamplingParams:
    return replace(params, seed=seed)
