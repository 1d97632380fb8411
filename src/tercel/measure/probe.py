"""Was a head read as it was meant? Its acceptance as read, and with each reading changed by one step.

A list of layer ids carried from one format to another captures one layer off, a norm flag left out takes another
default: nothing fails, drafts are only worse. So the readings are tried on a few answers of the target itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tercel.chat import TokenizedChat
from tercel.decode.engine import Engine
from tercel.decode.proposers import VANILLA, make_proposer
from tercel.decode.sampling import SamplingParams
from tercel.decode.types import GenerationResult, Request
from tercel.draft import DraftModel
from tercel.errors import TercelError
from tercel.measure.chains import greedy_chains
from tercel.measure.divergence import Progress
from tercel.measure.intervals import Interval, ratio_of_totals, speedup
from tercel.measure.tasks import Prompt
from tercel.measure.variants import Variant, readings
from tercel.target_model.protocol import TargetModel
from tercel.train.acceptance import Chains

DEPTH = 4
ANSWER_TOKENS = 64
NOTHING = 0.05  # share of right first drafts below which a head does not fit
BETTER = 1.02  # how many times as many tokens a step, at least, before a reading is doubted
SLOTS = 8  # answers made at a time
PIECE = 16  # places in an answer that are resampled together


@dataclass(frozen=True)
class ProbeRow:
    """One reading. alpha: share of right drafts at position 0, 1, … given that those before were right (None where
    none was tried). tau: tokens a target forward of a chain of that depth, its own included. Both over chains begun at
    every place of the answers. gain: tau over that of the reading as it stands, pieces of answers resampled in
    pairs."""

    setting: str
    alpha: tuple[float | None, ...]
    tau: Interval
    gain: Interval
    remedy: str

    @property
    def alpha0(self) -> float:
        return self.alpha[0] or 0.0

    @property
    def clearly_better(self) -> bool:
        return self.gain.value >= BETTER and self.gain.low > 1.0  # a NaN is never above


@dataclass(frozen=True)
class ProbeReport:
    """rows: the first is the head as read. verdict: one sentence. holds: whether nothing speaks against the reading.
    prompts: answers it was tried on."""

    rows: tuple[ProbeRow, ...]
    verdict: str
    holds: bool
    prompts: int

    def to_json(self) -> dict[str, Any]:
        return {
            "rows": [
                {**asdict(row), "tau": row.tau.value, "tau_ci95": row.tau.ci95, "gain": row.gain.value,
                 "gain_ci95": row.gain.ci95}
                for row in self.rows
            ],
            "verdict": self.verdict,
            "holds": self.holds,
            "prompts": self.prompts,
        }  # fmt: skip


def probe(
    model: DraftModel,
    target: TargetModel,
    prompts: Sequence[Prompt],
    *,
    answer_tokens: int = ANSWER_TOKENS,
    progress: Progress = lambda done, total: None,
) -> ProbeReport:
    """Try the readings of a head on the target's greedy answers to `prompts`.

    Raises `TercelError` if the head cannot stand beside the target, or no answer is long enough for a draft.
    """
    answers = greedy_answers(target, prompts, answer_tokens, progress)
    base: list[Chains] = []
    rows: list[ProbeRow] = []
    for variant in readings(model, target):
        chains = greedy_chains(variant.model, target, answers, DEPTH)
        base = base or chains
        rows.append(_row(variant, chains, base))
    return ProbeReport(tuple(rows), *_verdict(rows), len(base))


def greedy_answers(
    target: TargetModel,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    progress: Progress = lambda done, total: None,
) -> list[TokenizedChat]:
    """The target's own greedy answers, token by token, their tokens supervised.

    Raises `TercelError` if no answer has a token after its first, which no draft makes.
    """
    params = SamplingParams(max_new_tokens=max_new_tokens)
    vanilla = Engine(target, make_proposer(VANILLA, target), slots=SLOTS)
    answers, results = [], answer_all(vanilla, prompts, params, progress)
    for prompt, result in zip(prompts, results, strict=True):
        if len(result.tokens) > 1:
            answers.append(answered(prompt, result.tokens))
    if not answers:
        raise TercelError("the target answers these prompts with at most one token, so nothing can be drafted")
    return answers


def answer_all(
    engine: Engine, prompts: Sequence[Prompt], params: SamplingParams, progress: Progress
) -> list[GenerationResult]:
    """All answers in the order of the prompts; progress counts those that are finished.

    With a seed, prompt `i` has seed `params.seed + i`."""
    results: dict[int, GenerationResult] = {}
    seeds = [None if params.seed is None else params.seed + index for index in range(len(prompts))]
    asked = [Request(prompt.tokens, replace(params, seed=s)) for prompt, s in zip(prompts, seeds, strict=True)]
    for event in engine.stream(asked):
        if event.result is not None:
            results[event.index] = event.result.require()
            progress(len(results), len(prompts))
    return [results[index] for index in range(len(prompts))]


def answered(prompt: Prompt, tokens: Sequence[int]) -> TokenizedChat:
    """A prompt and an answer as training has them."""
    return TokenizedChat.of(prompt.id, [*prompt.tokens, *tokens], [False] * len(prompt.tokens) + [True] * len(tokens))


def _row(variant: Variant, chains: Sequence[Chains], base: Sequence[Chains]) -> ProbeRow:
    alpha = Chains.joined(chains).count(DEPTH).alpha
    tokens, places = _pieces(chains)
    gain = speedup(tokens, places, *_pieces(base))
    return ProbeRow(variant.setting, alpha, ratio_of_totals(tokens, places), gain, variant.remedy)


def _pieces(chains: Sequence[Chains]) -> tuple[list[float], list[float]]:
    """By piece of an answer: tokens of the steps begun there, the target's own included, and how many places it has.

    Few answers make long intervals; neighbouring places are not independent, but pieces nearly are, since what
    differs between two readings of the same text hangs on its last few tokens.
    """
    pieces = [piece for chain in chains for piece in chain.runs.split(PIECE)]
    return [float((piece + 1).sum()) for piece in pieces], [float(len(piece)) for piece in pieces]


def _verdict(rows: Sequence[ProbeRow]) -> tuple[str, bool]:
    first = rows[0]
    best = max(rows, key=lambda row: row.gain.value)
    if best.clearly_better:
        return (
            f"doubtful: with {best.setting} it accepts {best.alpha0:.0%} of first drafts instead of "
            f"{first.alpha0:.0%} ({best.gain.value:.2f} times as many tokens a step, "
            f"{best.gain.low:.2f}–{best.gain.high:.2f}); "
            f"set {best.remedy}",
            False,
        )
    if max(row.alpha0 for row in rows) < NOTHING:
        return (
            f"hardly any draft is right in any reading ({first.alpha0:.1%} of first ones): it is not a head of this "
            "target, or its weights are damaged",
            False,
        )
    if not math.isfinite(first.tau.low):
        return "no reading is known to be better, but these answers are too short to tell; give more --tasks", True
    return f"the reading holds: no other is clearly better ({first.alpha0:.0%} of first drafts accepted)", True
