"""Sampled answers against token-by-token decoding of the same seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tercel.decode.sampling import RandomStream, SamplingParams, target_distribution
from tercel.decode.types import GenerationResult, Request
from tercel.measure.divergence import Divergence, SameText, first_difference, history_of
from tercel.measure.rounding import run_shapes
from tercel.measure.tasks import Prompt
from tercel.target_model.model import Target


@dataclass(frozen=True)
class SameSeedCheck(SameText):
    """Sampled answers, each against the one that token-by-token decoding gives with the same seed."""


class SameSeed:
    """Compares answers of the same seed."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._sequences = self._tokens = 0
        self._divergences: list[Divergence] = []

    def compare(
        self,
        prompt: Prompt,
        requests: Sequence[Request],
        drafted: Sequence[GenerationResult],
        vanilla: Sequence[GenerationResult],
    ) -> None:
        for request, ours, theirs in zip(requests, drafted, vanilla, strict=True):
            at = first_difference(ours.tokens, theirs.tokens)
            self._sequences += 1
            self._tokens += len(theirs.tokens) if at is None else at
            if at is not None:
                self._divergences.append(
                    judge_sampled(self._target, prompt, ours.tokens, theirs.tokens, at, request.params)
                )

    def result(self) -> SameSeedCheck:
        return SameSeedCheck(self._sequences, self._tokens, tuple(self._divergences))


def judge_sampled(
    target: Target,
    prompt: Prompt,
    ours: Sequence[int],
    theirs: Sequence[int],
    at: int,
    params: SamplingParams,
) -> Divergence:
    """Whether rounding can have turned token `at`: the request's uniform must lie no further outside either
    token's stretch of the cumulative distribution than rounding moves such borders."""
    shapes = run_shapes(target, prompt.tokens, theirs[:at])
    positions = shapes.logits.shape[1]
    noise = 0.0
    cdf = torch.empty(0)
    for back in range(min(positions, at + 1)):
        history = history_of(target, prompt, theirs[: at - back])
        rows = shapes.logits[:, positions - 1 - back]
        cdfs = torch.stack([target_distribution(row, params, history) for row in rows]).cumsum(-1)
        noise = max(noise, float((cdfs - cdfs[0]).abs().max()))
        cdf = cdfs[0] if back == 0 else cdf
    uniform = RandomStream(params.seed).uniform(at)
    both = [tokens[at] for tokens in (ours, theirs) if at < len(tokens)]
    gap = max(_outside(cdf, token, uniform) for token in both)
    return Divergence(
        id=f"{prompt.id}, seed {params.seed}",
        position=at,
        token_draft=ours[at] if at < len(ours) else None,
        token_vanilla=theirs[at] if at < len(theirs) else None,
        top2_gap=gap,
        gap=gap,
        noise=noise,
        verdict="numerical" if len(both) == 2 and gap <= noise else "WRONG",
    )


def _outside(cdf: Tensor, token: int, uniform: float) -> float:
    """How far `uniform` lies outside the token's stretch of the cumulative distribution `[V]`."""
    low = float(cdf[token - 1]) if token else 0.0
    return max(0.0, low - uniform, uniform - float(cdf[token]))
