"""Sampled text: is what drafted decoding writes at a temperature distributed as the target's own?

Four looks at the same samples:
- Drafts: tokens that the draft favours must be chosen as often as the target's exact distribution says, over
  all tokens at once. A faulty acceptance rule errs in just this direction.
- PIT: each token, mapped through the exact distribution after its own prefix, must be uniform, however large
  the vocabulary and long the prefixes.
- First tokens: chi-square of the counts after each prefix that many samples share.
- Same seed: the rule for deterministic drafts draws token `i` with uniform `i` of the request, drafted or
  not, so that the text must be equal; sharper than any statistic.

The exact distributions come from whole-sequence forwards of the stock model: no cache, no tree, no
verification.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tercel import limits
from tercel.decode.engine import Engine
from tercel.decode.sampling import SamplingParams, target_distribution
from tercel.decode.types import Request
from tercel.errors import TercelError
from tercel.measure.divergence import BATCH, Progress, history_of, require_prompts
from tercel.measure.drafts import Drafted, DraftRecorder
from tercel.measure.goodness import (
    chi_square,
    chi_square_tail,
    chi_square_uniform,
    combine,
    ks_uniform,
    normal_tails,
    randomised_pit,
)
from tercel.measure.methods import Generator
from tercel.measure.rounding import run_shapes
from tercel.measure.same_seed import SameSeed, SameSeedCheck
from tercel.measure.tasks import Prompt
from tercel.target_model.model import Target

FIRST = 3  # generated tokens with a chi-square of their own; the very first is prefill's
ROWS = 16  # sequences a forward when the exact distributions are computed
MIN_VARIANCE = 10.0  # of a sum of indicators, from which on it counts as normal
AUXILIARY = 0x5EED  # keeps the PIT's random numbers apart from every request's

Answer = tuple[int, ...]


@dataclass(frozen=True)
class SampledCheck:
    """p_value: of all tests together; 0 if a token appeared that the target never emits there (`impossible`).
    alpha: a lossless decoder is accused with at most this probability. tests: p-value by name. accepted:
    draft tokens that the samples took over; with few of them the check says little. same_seed: None if not
    asked for."""

    samples: int
    tokens: int
    accepted: int
    p_value: float
    alpha: float
    tests: dict[str, float]
    impossible: int
    same_seed: SameSeedCheck | None

    @property
    def ok(self) -> bool:
        return self.p_value >= self.alpha and (self.same_seed is None or self.same_seed.ok)

    def to_json(self) -> dict[str, Any]:
        fields = {name: value for name, value in vars(self).items() if name != "same_seed"}
        same_seed = None if self.same_seed is None else self.same_seed.to_json()
        return {**fields, "same_seed": same_seed, "ok": self.ok}


@torch.no_grad()
def check_sampled(
    target: Target,
    drafted: Engine,
    prompts: Sequence[Prompt],
    n_samples: int,
    params: SamplingParams,
    *,
    vanilla: Generator | None = None,
    alpha: float = 1e-3,
    progress: Progress = lambda done, total: None,
) -> SampledCheck:
    """Draw `n_samples` answers of `params.max_new_tokens` tokens to each prompt and test their distribution.

    Sample `j` of prompt `i` has seed `params.seed + i * n_samples + j`. End tokens are sampled like any other
    but end nothing, so that every sample has its full length. vanilla: an engine for the comparison by seed;
    leave it out for proposers that sample their drafts, whose text is equal in distribution only.

    Raises `TercelError` for temperature 0, no prompt, no sample, or an error rate outside (0, 1).
    """
    if params.greedy:
        raise TercelError("the sampled check needs a temperature above 0; the greedy check is for 0")
    if not 1 <= n_samples <= limits.REPEATS or not 0 < alpha < 1:
        raise TercelError(
            f"the sampled check needs 1 to {limits.REPEATS:,} samples and an error rate between 0 and 1, not "
            f"{n_samples} and {alpha}"
        )
    require_prompts(prompts)
    base = params.seed or 0
    endless = replace(params, ignore_eos=True, stop=(), stop_token_ids=())
    fit, same = _Fit(np.random.default_rng([AUXILIARY, base])), SameSeed(target)
    recorder = DraftRecorder(drafted.proposer)
    engine = Engine(target, recorder, slots=drafted.slots)
    accepted, done = 0, 0
    for number, prompt in enumerate(prompts):
        samples: list[Sample] = []
        seeds = range(base + number * n_samples, base + (number + 1) * n_samples)
        for start in range(0, n_samples, BATCH):
            requests = [Request(prompt.tokens, replace(endless, seed=seed)) for seed in seeds[start : start + BATCH]]
            results = engine.generate(requests)
            if vanilla is not None:
                same.compare(prompt, requests, results, vanilla.generate(requests))
            for request, result in zip(requests, results, strict=True):
                assert request.params.seed is not None
                opinions = recorder.take(request.params.seed, len(prompt.tokens), result.tokens)
                samples.append(Sample(result.tokens, opinions))
            accepted += sum(sum(result.accepted) for result in results)
            done += len(requests)
            progress(done, len(prompts) * n_samples)
        fit.add(target, prompt, samples, endless)
    tests = fit.tests()
    return SampledCheck(
        samples=n_samples * len(prompts),
        tokens=fit.tokens,
        accepted=accepted,
        p_value=0.0 if fit.impossible else combine(tests),
        alpha=alpha,
        tests=tests,
        impossible=fit.impossible,
        same_seed=None if vanilla is None else same.result(),
    )


@dataclass(frozen=True)
class Sample:
    """An answer and what was drafted on the way, by index in the answer."""

    tokens: Answer
    drafted: Mapping[int, Drafted]


class _Fit:
    """Collects what the tests need, prompt by prompt."""

    def __init__(self, auxiliary: np.random.Generator) -> None:
        self._auxiliary = auxiliary
        self._pit: list[float] = []
        self._chi = [(0.0, 0)] * FIRST  # statistic and degrees of freedom by position
        self._excess = self._variance = 0.0  # of tokens that the draft favours
        self.impossible = 0
        self.tokens = 0

    def add(self, target: Target, prompt: Prompt, samples: Sequence[Sample], params: SamplingParams) -> None:
        followers: dict[Answer, list[tuple[int, Drafted | None]]] = defaultdict(list)
        for sample in samples:
            for index, token in enumerate(sample.tokens):
                followers[sample.tokens[:index]].append((token, sample.drafted.get(index)))
        answers = [sample.tokens for sample in samples]
        for prefix, probs in exact_distributions(target, prompt, answers, params):
            counts = Counter(token for token, _ in followers[prefix])
            self._place(target, prompt, prefix, probs, counts, params)
            for token, drafted in followers[prefix]:
                if drafted is not None:
                    self._weigh(token, drafted.favoured(probs), probs)

    def _place(
        self,
        target: Target,
        prompt: Prompt,
        prefix: Answer,
        probs: NDArray[np.float64],
        counts: Counter[int],
        params: SamplingParams,
    ) -> None:
        observed = np.zeros(len(probs))
        for token, count in sorted(counts.items()):
            self.tokens += count
            if probs[token] > 0:
                observed[token] = count
                self._pit += [randomised_pit(probs, token, u) for u in self._auxiliary.random(count)]
            elif not _possible_by_rounding(target, prompt, prefix, token, params):
                self.impossible += count
        if len(prefix) < FIRST:
            statistic, df = chi_square(observed, probs * observed.sum())
            total, dfs = self._chi[len(prefix)]
            self._chi[len(prefix)] = (total + statistic, dfs + df)

    def _weigh(self, token: int, favoured: NDArray[np.int64], probs: NDArray[np.float64]) -> None:
        mass = min(1.0, float(probs[favoured].sum()))
        self._excess += float(token in favoured) - mass
        self._variance += mass * (1 - mass)

    def tests(self) -> dict[str, float]:
        """p-value by name; tests without enough data are left out."""
        if not self._pit:  # every token was impossible
            return {}
        tests = {"pit_ks": ks_uniform(self._pit), "pit_chi_square": chi_square_uniform(self._pit)}
        if self._variance >= MIN_VARIANCE:
            tests["drafts"] = normal_tails(self._excess / math.sqrt(self._variance))
        for index, (statistic, df) in enumerate(self._chi):
            if df:
                tests[f"token_{index + 1}_chi_square"] = chi_square_tail(statistic, df)
        return tests


def exact_distributions(
    target: Target, prompt: Prompt, answers: Sequence[Answer], params: SamplingParams
) -> Iterator[tuple[Answer, NDArray[np.float64]]]:
    """Each proper prefix of the answers once, with the target's distribution `[V]` after it, processors
    applied."""
    seen: set[Answer] = set()
    unique = sorted(set(answers))
    for start in range(0, len(unique), ROWS):
        rows = unique[start : start + ROWS]
        longest = max(map(len, rows))
        padded = [[*prompt.tokens, *row, *[0] * (longest - len(row))] for row in rows]
        hidden = target.encode(torch.tensor(padded, device=target.device)).hidden[:, len(prompt.tokens) - 1 :]
        for row, states in zip(rows, hidden, strict=True):
            fresh = [index for index in range(len(row)) if row[:index] not in seen]
            if not fresh:
                continue
            history = history_of(target, prompt, row[: fresh[0]])
            for index, logits in zip(fresh, target.logits(states[fresh]), strict=True):
                seen.add(row[:index])
                yield row[:index], target_distribution(logits, params, history).cpu().numpy()
                history.push(row[index])


def _possible_by_rounding(target: Target, prompt: Prompt, prefix: Answer, token: int, params: SamplingParams) -> bool:
    """Whether some shape of forward gives `token` a probability: rounding may move it across a top-k or top-p
    border."""
    history = history_of(target, prompt, prefix)
    last = run_shapes(target, prompt.tokens, prefix).last
    return any(float(target_distribution(logits, params, history)[token]) > 0 for logits in last)
