"""n-α: how often a chain's draft is right when `n` of the head's inputs are its own outputs (spec section
10)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from tercel.decode.sampling import SamplingParams
from tercel.decode.types import GenerationResult, Request
from tercel.draft.acceptance import NAlpha, count_chains, tokens_of_steps
from tercel.errors import TercelError
from tercel.measure.methods import Generator
from tercel.measure.tasks import Prompt


def n_alpha(
    chain: Generator,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    depth: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> NAlpha:
    """Decode `prompts` with an engine whose proposer drafts a chain of `depth` tokens in every step.

    With a temperature, prompt `i` has seed `params.seed + i`. progress: called with prompts done and in all.
    """
    results = []
    for index, prompt in enumerate(prompts):
        seeded = params if params.seed is None else replace(params, seed=params.seed + index)
        results += chain.generate([Request(prompt.tokens, seeded)])
        progress(index + 1, len(prompts))
    return count_alpha(results, depth)


def count_alpha(results: Iterable[GenerationResult], depth: int) -> NAlpha:
    """Count tries and successes at every chain position.

    The step that ended an answer may be cut: its accepted drafts count, but where it was cut nothing is known
    of the next draft, so that one is neither right nor wrong.
    Raises `TercelError` if a step accepted more than `depth` drafts: then the chain was not that deep.
    """
    accepted: list[int] = []
    room: list[int] = []
    for result in results:
        accepted += result.accepted
        room += [depth] * len(result.accepted)
        if result.accepted:
            last_emitted = tokens_of_steps(result.tokens) - sum(taken + 1 for taken in result.accepted[:-1])
            room[-1] = min(depth, last_emitted)
    if accepted and max(accepted) > depth:
        raise TercelError(
            f"a step accepted {max(accepted)} drafts, but the chain is said to be {depth} deep; "
            "pass the depth of the engine's chain"
        )
    return count_chains(accepted, room, depth)
