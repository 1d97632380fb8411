"""Do answers that were sampled follow the target's distribution? A speed of those that do not means nothing.

The surprise of a token drawn from a distribution is on average that distribution's entropy. If answers are the target's
own, however they were drafted, what their tokens' surprises exceed the entropies by is 0 but for chance.

Shape legend: T tokens of an answer, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from interleaved import Round

from tercel.target_model.protocol import TargetModel

SURE = 5.0  # standard errors


def excess(
    target: TargetModel, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], temperature: float
) -> dict[str, Any]:
    """Mean surprise less entropy, in nats a token, with its 95 % interval; `follows` is False beyond `SURE` standard
    errors."""
    differences: list[float] = []
    for prompt, answer in zip(prompts, answers, strict=True):
        hidden_TK = target.encode(torch.tensor([[*prompt, *answer[:-1]]])).hidden[0, len(prompt) - 1 :]
        log_p_TV = (target.logits(hidden_TK).float() / temperature).log_softmax(-1)
        surprise_T = -log_p_TV.gather(1, torch.tensor(answer)[:, None])[:, 0]
        entropy_T = -(log_p_TV.exp() * log_p_TV).sum(-1)
        differences += (surprise_T - entropy_T).tolist()
    count = len(differences)
    mean, error = sum(differences) / count, math.sqrt(sum(d * d for d in differences)) / count
    return {
        "excess_nats": mean,
        "ci95": [mean - 1.96 * error, mean + 1.96 * error],
        "follows": abs(mean) <= SURE * error,
    }


def judged(target: TargetModel, rounds: Sequence[Round]) -> dict[str, dict[str, Any]]:
    """Of every peer, from all that it answered."""
    found = {}
    for peer in dict.fromkeys(peer for one in rounds for peer in one.answers):
        own = [one for one in rounds if peer in one.answers]
        prompts, answers = [one.asked.question.prompt for one in own], [one.answers[peer].tokens for one in own]
        found[peer] = excess(target, prompts, answers, own[0].asked.question.temperature)
    return found
