"""How many tokens an engine should draft for somebody's own prompts, simulated: what is accepted is measured here, on
the target's own answers; what a step costs there is told by whoever knows it, or left open.

A step of `n` verified tokens yields τ tokens. It pays where it costs less than τ times a step of one token: the
break-even that is told where costs are not known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tercel.chat import TokenizedChat
from tercel.decode.costs import HeadCosts, StepCosts
from tercel.decode.engine import Engine
from tercel.decode.proposers import EAGLE3, VANILLA, make_proposer
from tercel.decode.sampling import SamplingParams
from tercel.draft import DraftModel
from tercel.draft.acceptance import tokens_of_steps
from tercel.draft.shape import TreeShape
from tercel.errors import TercelError
from tercel.measure.chains import greedy_chains
from tercel.measure.divergence import Progress, counting_from
from tercel.measure.intervals import Interval, ratio_of_totals
from tercel.measure.probe import SLOTS, answer_all, answered
from tercel.measure.tasks import Prompt
from tercel.measure.tune import told
from tercel.reading import read_json, short
from tercel.target_model.protocol import TargetModel
from tercel.train.acceptance import Chains

LONGEST = 8  # drafted tokens of a chain
TREES = (TreeShape(2, 3, 6), TreeShape(4, 3, 8), TreeShape(4, 4, 16), TreeShape(8, 5, 32), TreeShape(8, 6, 64))
WORTH = 0.1  # tokens a step that another draft has to add, where costs are not known
_COST_ADVICE = 'give an object such as {"forward_ms": {"1": 9.8, "4": 10.4, "8": 11}, "draft_ms": 0.7}'


@dataclass(frozen=True)
class Drafted:
    """What steps of one shape yielded: tokens and steps by answer."""

    shape: TreeShape
    tokens: tuple[int, ...]
    steps: tuple[int, ...]

    @property
    def tau(self) -> Interval:
        return ratio_of_totals(self.tokens, self.steps)


@dataclass(frozen=True)
class EngineCosts:
    """Milliseconds there. forward: of a step, by the tokens that it verifies, 1 among them; what lies between is
    interpolated. draft: of each level of a draft."""

    forward: Mapping[int, float]
    draft: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.draft) and self.draft >= 0):
            raise TercelError(f"a draft takes no {short(self.draft)} ms; {_COST_ADVICE}")
        _ = self._table

    @property
    def _table(self) -> StepCosts:
        return StepCosts({1: self.forward}, head=HeadCosts(0.0, {1: self.draft}))

    def step(self, shape: TreeShape | None) -> float:
        """Of a step with such a draft; None: without."""
        nodes, levels = (1, 0) if shape is None else (shape.nodes, shape.depth)
        return float(self._table.forward_ms(1, np.array([float(nodes)]), 0)[0]) + levels * self.draft

    def with_step(self, shape: TreeShape, ms: float) -> EngineCosts:
        """The same where whole steps with such a draft were measured."""
        forward = ms - shape.depth * self.draft
        return EngineCosts({**self.forward, shape.nodes: max(forward, self.step(None))}, self.draft)

    def speedup(self, drafted: Drafted) -> Interval:
        """Over steps without drafts."""
        tau, ratio = drafted.tau, self.step(None) / self.step(drafted.shape)
        return Interval(tau.value * ratio, tau.low * ratio, tau.high * ratio)


def read_costs(path: Path) -> EngineCosts:
    """`{"forward_ms": {"1": …, "4": …}, "draft_ms": …}`, or the inner map alone; also what `tercel profile --json`
    writes. Raises `TercelError` for anything else."""
    value = read_json(path, _COST_ADVICE)
    table, draft = value.get("forward_ms", value), value.get("draft_ms", 0.0)
    try:
        forward = {int(width): float(ms) for width, ms in table.items()}
        return EngineCosts(forward, float(draft))
    except (AttributeError, TypeError, ValueError, OverflowError, TercelError) as error:
        raise TercelError(
            f"{path} holds no costs by number of verified tokens, 1 among them; {_COST_ADVICE}"
        ) from error


@dataclass(frozen=True)
class Simulation:
    """acceptance: chances that the first draft of a chain, the first two, … are right, at the places where steps begin.
    chains: of 1, 2, … tokens. trees: empty where the engine drafts none."""

    answers: int
    acceptance: tuple[float, ...]
    chains: tuple[Drafted, ...]
    trees: tuple[Drafted, ...] = ()

    @property
    def all(self) -> tuple[Drafted, ...]:
        return (*self.chains, *self.trees)


def simulate_drafts(
    target: TargetModel,
    model: DraftModel,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    longest: int = LONGEST,
    trees: Sequence[TreeShape] = (),
    progress: Progress = lambda done, total: None,
) -> Simulation:
    """Answer `prompts` as `params` have it and see which drafts would be accepted.

    Chains of all lengths come of one pass over the answers; trees are decoded with, each by itself.
    Raises `TercelError` if the head is none of EAGLE-3, or no answer is long enough for a draft.
    """
    total, vanilla = (1 + len(trees)) * len(prompts), make_proposer(VANILLA, target)
    params = replace(params, seed=params.seed or 0)
    plain = answer_all(Engine(target, vanilla, slots=SLOTS), prompts, params, counting_from(0, total, progress))
    answers = [
        answered(prompt, result.tokens) for prompt, result in zip(prompts, plain, strict=True) if len(result.tokens) > 1
    ]
    if not answers:
        raise TercelError("the target answers these prompts with at most one token, so nothing can be drafted")
    chains, acceptance = chains_by_length(model, target, answers, longest)
    grown = []
    for number, shape in enumerate(trees, 1):
        engine = Engine(target, make_proposer(EAGLE3, target, head=model, shape=shape), slots=SLOTS)
        results = answer_all(engine, prompts, params, counting_from(number * len(prompts), total, progress))
        used = [result for result in results if result.steps]
        tokens, steps = tuple(tokens_of_steps(r.tokens) for r in used), tuple(r.steps for r in used)
        grown.append(Drafted(shape, tokens, steps))
    return Simulation(len(answers), acceptance, chains, tuple(grown))


def chains_by_length(
    model: DraftModel, target: TargetModel, answers: Sequence[TokenizedChat], longest: int
) -> tuple[tuple[Drafted, ...], tuple[float, ...]]:
    """Chains of 1 … `longest` drafts, and what is accepted of the longest."""
    whole = greedy_chains(model, target, answers, longest)
    return tuple(drafted_chains(whole, depth) for depth in range(1, longest + 1)), joint_acceptance(whole, longest)


def drafted_chains(whole: Sequence[Chains], depth: int) -> Drafted:
    """The steps of chains of `depth`, cut from longer ones."""
    cut = [Chains(chains.runs.clamp(max=depth), chains.room.clamp(max=depth)) for chains in whole]
    steps = tuple(len(chains.walk().runs) for chains in cut)
    return Drafted(TreeShape.chain(depth), tuple(len(chains.runs) for chains in cut), steps)


def joint_acceptance(whole: Sequence[Chains], depth: int) -> tuple[float, ...]:
    """At the places where a decoder begins its steps: shares whose first draft, first two, … are right."""
    steps = Chains.joined([chains.walk() for chains in whole])
    return tuple(right / len(steps.runs) for right in steps.count(depth).right)


@dataclass(frozen=True)
class EngineVerdict:
    """shape: what to draft; None: nothing. speedup: None where costs are not known. sentence: what to do, and why."""

    shape: TreeShape | None
    launched: TreeShape
    speedup: Interval | None
    sentence: str


def engine_verdict(title: str, found: Simulation, costs: EngineCosts | None) -> EngineVerdict:
    """What to draft in the engine called `title`.

    launched: the shape for the launch line, the best there is even where nothing pays.
    """
    if costs is None:
        chosen = _worth_drafting(found.chains)
        tau = chosen.tau
        return EngineVerdict(
            chosen.shape,
            chosen.shape,
            None,
            f"draft {_words(chosen.shape)} in {title} if that pays: a step yields {told(tau)} tokens, so it does where "
            f"verifying {chosen.shape.nodes} tokens, drafting included, costs less than {tau.value:.2f} times one "
            "token there; more drafts would add less than "
            f"{WORTH:g} tokens a step each (--cost-json or --url tell what they cost)",
        )
    best = max(found.all, key=lambda drafted: costs.speedup(drafted).value)
    gain = costs.speedup(best)
    times = f"{told(gain)} times as fast as without drafts at these costs (τ {told(best.tau)})"
    if gain.ci95 is None:
        sentence, shape = f"drafting {_words(best.shape)} in {title} would be {times}; give more prompts", best.shape
        return EngineVerdict(shape if gain.value > 1 else None, best.shape, gain, sentence)
    if gain.low > 1:
        return EngineVerdict(best.shape, best.shape, gain, f"draft {_words(best.shape)} in {title}: {times}")
    more = "" if gain.high < 1 else ", which is no sure gain; more prompts may tell"
    sentence = f"do not speculate in {title}: the best setting, {_words(best.shape)}, is {times}{more}"
    return EngineVerdict(None, best.shape, gain, sentence)


def _worth_drafting(chains: Sequence[Drafted]) -> Drafted:
    """The longest chain whose every draft adds `WORTH` tokens a step; of one, if none does."""
    best = chains[0]
    for longer in chains[1:]:
        if longer.tau.value - best.tau.value < WORTH:
            break
        best = longer
    return best


def _words(shape: TreeShape) -> str:
    if shape.top_k == 1:
        return "1 token" if shape.depth == 1 else f"{shape.depth} tokens"
    return str(shape)


def settings_json(found: Simulation, costs: EngineCosts | None) -> list[dict[str, Any]]:
    """A row a shape, for JSON. break_even: times one token that a step may cost at most; as τ, drafting included."""
    rows = []
    for drafted in found.all:
        tau, gain = drafted.tau, None if costs is None else costs.speedup(drafted)
        rows.append(
            {
                "speculative_tokens": drafted.shape.depth,
                **asdict(drafted.shape),
                "tau": tau.value,
                "tau_ci95": tau.ci95,
                "break_even": tau.value,
                "speedup": None if gain is None else gain.value,
                "speedup_ci95": None if gain is None else gain.ci95,
            }
        )
    return rows
