"""n-α: how often a chain's draft is right when `n` of the head's inputs are its own outputs (spec section
10)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from tercel.decode.sampling import SamplingParams
from tercel.decode.types import GenerationResult, Request
from tercel.errors import TercelError
from tercel.measure.methods import Generator
from tercel.measure.tasks import Prompt


@dataclass(frozen=True)
class NAlpha:
    """alpha[n]: share of right drafts at chain position `n`, given that all before were right; None if no
    draft was ever tried there. seen[n]: how many were tried."""

    alpha: tuple[float | None, ...]
    seen: tuple[int, ...]


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
    tried, right = [0] * depth, [0] * depth
    for result in results:
        last_emitted = len(result.tokens) - 1 - sum(accepted + 1 for accepted in result.accepted[:-1])
        for step, accepted in enumerate(result.accepted):
            if accepted > depth:
                raise TercelError(
                    f"a step accepted {accepted} drafts, but the chain is said to be {depth} deep; "
                    "pass the depth of the engine's chain"
                )
            cut = step == len(result.accepted) - 1 and last_emitted <= accepted
            for n in range(accepted):
                tried[n] += 1
                right[n] += 1
            if accepted < depth and not cut:
                tried[accepted] += 1
    alpha = tuple(good / of if of else None for good, of in zip(right, tried, strict=True))
    return NAlpha(alpha, tuple(tried))
