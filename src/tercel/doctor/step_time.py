"""What a step of a running server takes, timed from outside."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tercel.doctor.compare import draft_of
from tercel.doctor.engine_client import EngineClient
from tercel.draft.acceptance import tokens_of_steps
from tercel.draft.shape import TreeShape
from tercel.errors import TercelError
from tercel.measure.divergence import Progress
from tercel.measure.intervals import Interval, ratio_of_totals
from tercel.measure.tasks import Prompt
from tercel.measure.tune import told


@dataclass(frozen=True)
class ServedSteps:
    """draft: what the server drafts now. ms: of a step with it, drafting included. tau: tokens of a step there."""

    draft: TreeShape
    ms: Interval
    tau: Interval

    @property
    def token_ms(self) -> float:
        """What a token takes there."""
        return self.ms.value / self.tau.value

    def sentence(self, title: str) -> str:
        """Whether drafting pays there as it does now, for whoever knows the server without a head."""
        return (
            f"{title} runs with {self.draft} now: a step takes {self.ms.value:.3g} ms there and yields "
            f"{told(self.tau)} tokens, which pays if without a head it gives fewer than "
            f"{1e3 / self.token_ms:,.3g} tokens/s"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "speculative_tokens": self.draft.depth,
            "top_k": self.draft.top_k,
            "nodes": self.draft.nodes,
            "step_ms": self.ms.value,
            "step_ms_ci95": self.ms.ci95,
            "tau": self.tau.value,
            "tau_ci95": self.tau.ci95,
        }


def time_steps(
    server: EngineClient,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    progress: Progress = lambda done, total: None,
    clock: Callable[[], float] = time.perf_counter,
) -> ServedSteps:
    """Ask the server `prompts`, greedily and one by one.

    A prompt is asked for one token twice first: the second time takes what prompt and transport take, cached or not,
    and is subtracted. Raises `TercelError` if the server cannot be reached, drafts nothing, or its answers are too
    short for a step.
    """
    answers, seconds = [], []
    for done, prompt in enumerate(prompts, 1):
        server.answer(prompt.tokens, 1)
        begun = clock()
        server.answer(prompt.tokens, 1)
        between = clock()
        answers.append(server.answer(prompt.tokens, max_new_tokens))
        seconds.append((clock() - between) - (between - begun))
        progress(done, len(prompts))
    draft = draft_of(server, answers)
    used = [(a, s) for a, s in zip(answers, seconds, strict=True) if a.counts.drafts and s > 0 and a.length > 1]
    if not used:
        raise TercelError("the server's answers are too short to time its steps; raise --max-new-tokens")
    steps = [float(answer.counts.drafts) for answer, _ in used]
    return ServedSteps(
        draft,
        ratio_of_totals([1e3 * taken for _, taken in used], steps),
        ratio_of_totals([float(tokens_of_steps(answer.length)) for answer, _ in used], steps),
    )
