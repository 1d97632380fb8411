"""Greedy text: drafted decoding must give the very token ids of token-by-token decoding.

Where they part, the target's logits are recomputed in several shapes, and only a tie that rounding can turn
is excused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tercel.decode.sampling import SamplingParams, processed_logits
from tercel.decode.types import Request
from tercel.errors import TercelError
from tercel.measure.divergence import (
    BATCH,
    Divergence,
    Progress,
    SameText,
    first_difference,
    history_of,
    require_prompts,
)
from tercel.measure.methods import Generator
from tercel.measure.rounding import run_shapes
from tercel.measure.tasks import Prompt
from tercel.target_model.model import Target


@dataclass(frozen=True)
class GreedyCheck(SameText):
    """Greedy answers. accepted: draft tokens that the drafted answers took over; with few the check says little."""

    accepted: int

    def to_json(self) -> dict[str, Any]:
        return {**super().to_json(), "accepted": self.accepted}


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
    tokens, accepted, divergences = 0, 0, []
    for start in range(0, len(prompts), BATCH):
        batch = prompts[start : start + BATCH]
        requests = [Request(prompt.tokens, params) for prompt in batch]
        answers = zip(drafted.generate(requests), vanilla.generate(requests), strict=True)
        for prompt, (ours, theirs) in zip(batch, answers, strict=True):
            at = first_difference(ours.tokens, theirs.tokens)
            accepted += sum(ours.accepted)
            tokens += len(theirs.tokens) if at is None else at
            if at is not None:
                divergences.append(judge_greedy(target, prompt, ours.tokens, theirs.tokens, at, params))
        progress(start + len(batch), len(prompts))
    return GreedyCheck(len(prompts), tokens, tuple(divergences), accepted)


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
