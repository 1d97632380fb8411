"""How likely the target held each token of a text, for clients that ask: of its own logits, before any processor.

`M` tokens, `V` the target's vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tercel.target_model.protocol import TargetModel

_ROWS = 64  # of a prompt whose logits are made at a time


@dataclass(frozen=True)
class TokenLogprob:
    """likeliest: the most probable tokens at its place, with theirs, the best first."""

    token: int
    logprob: float
    likeliest: tuple[tuple[int, float], ...]


def token_logprobs(logits: Tensor, tokens: Sequence[int], count: int) -> tuple[TokenLogprob, ...]:
    """Of each of `tokens`, by the logits `[M, V]` that it was chosen from, with the `count` likeliest."""
    scores = logits[: len(tokens)].cpu().double().log_softmax(-1)
    own = scores.gather(1, torch.tensor(tokens, dtype=torch.long)[:, None]).squeeze(1).tolist()
    best = scores.topk(min(count, scores.shape[1]), -1)
    likeliest = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return tuple(
        TokenLogprob(token, logprob, tuple(zip(*top, strict=True)))
        for token, logprob, top in zip(tokens, own, likeliest, strict=True)
    )


def prompt_logprobs(target: TargetModel, hidden: Tensor, prompt: Sequence[int], count: int) -> tuple[TokenLogprob, ...]:
    """Of every token of a prompt but the first, by the target's last hidden states `[T, K]` over it."""
    told: list[TokenLogprob] = []
    for start in range(0, len(prompt) - 1, _ROWS):
        tokens = prompt[start + 1 : start + 1 + _ROWS]
        told += token_logprobs(target.logits(hidden[start : start + len(tokens)]), tokens, count)
    return tuple(told)
