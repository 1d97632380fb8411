"""Where the time of decoding goes on this machine, and what the machine would need at least.

The target's forward by width and context, its output layer and a head's levels are run alone, in turn with the reads
and products that say what the machine can do; whole steps are timed by the loop's own clock over real prompts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from tercel import limits
from tercel.decode.clock import PHASES, PhaseClock
from tercel.decode.head_proposer import HeadProposer
from tercel.decode.loop import DecodingLoop
from tercel.decode.pieces import Context
from tercel.decode.proposer import Proposer, innermost
from tercel.decode.sampling import SamplingParams
from tercel.decode.stopwatch import Patience, time_in_turn
from tercel.decode.types import GenerationResult, Request
from tercel.draft.acceptance import tokens_of_steps
from tercel.errors import TercelError
from tercel.heads import known_as
from tercel.measure.intervals import Interval, median, ratio_of_totals
from tercel.measure.machine import Ceilings, multiplying, reading
from tercel.measure.profile_cases import Case, forward_case, head_cases, output_case
from tercel.measure.profile_result import Profile, Steps, Timed
from tercel.measure.tasks import Prompt
from tercel.memory import available_memory
from tercel.reading import short
from tercel.target_model.protocol import TargetModel

WIDTHS, CONTEXTS, USUAL_CONTEXT = (1, 2, 4, 8, 16, 32, 64), (64, 256, 1024, 4096), 256
WARM_UP_TOKENS = 8
STEADY = 0.7  # of the best: what a machine does on the median that has nothing else to do
OnProgress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class ProfileSettings:
    """widths: of blocks; None for the usual ones that the target can take. contexts: tokens before a block; None for
    those of `usual_contexts` for which there is room. patience: how often everything is run. params: how prompts are
    answered.

    Raises `TercelError` for a width or context that is none.
    """

    widths: tuple[int, ...] | None = None
    contexts: tuple[int, ...] | None = None
    usual_contexts: tuple[int, ...] = CONTEXTS
    patience: Patience = field(default_factory=lambda: Patience(45.0))
    params: SamplingParams = field(default_factory=lambda: SamplingParams(max_new_tokens=64))

    def __post_init__(self) -> None:
        asked = ("block", self.widths, limits.DRAFT_NODES), ("context", self.contexts, limits.COUNT)
        for what, values, most in asked:
            if values == ():
                raise TercelError(f"there is no {what} to measure; name at least one")
            for value in values or ():
                if not 1 <= value <= most:
                    raise TercelError(f"a {what} has 1 to {most:,} tokens, not {short(value)}")


def run_profile(
    target: TargetModel,
    proposers: Mapping[str, Proposer],
    prompts: Sequence[Prompt],
    settings: ProfileSettings,
    progress: OnProgress = lambda stage, done, total: None,
) -> Profile:
    """Measure everything.

    proposers: by name, whose steps over `prompts` are timed; the levels are those of the first that drafts with a head.
    progress: a stage, and how far it is.

    Raises `TercelError` for widths or contexts that the target does not take, and if no prompt leaves room for steps.
    """
    widths, contexts, notes = _chosen(target, settings)
    usual = max((length for length in contexts if length <= USUAL_CONTEXT), default=contexts[0])
    drafting = next((p for p in map(innermost, proposers.values()) if isinstance(p, HeadProposer)), None)
    capture = () if drafting is None else drafting.feature_layers
    steps = _time_steps(target, proposers, prompts, settings.params, progress)

    cases: dict[tuple[str, str, int], Case] = {}
    total, run = sum(contexts), 0
    for length in contexts:

        def more(tokens: int) -> None:
            nonlocal run
            run += tokens
            progress("contexts", run, total)

        context = Context(target, length, max(widths), more, capture)
        for width in widths:
            cases["forward", str(length), width] = forward_case(context, width, capture)
        if length == usual and drafting is not None:
            cases |= {("head", name, 0): case for name, case in head_cases(drafting, context)}
    cases |= {("output", "", width): output_case(target, width) for width in widths}

    probes = {
        "bandwidth": reading(target.work.layers, target.device),
        "peak": multiplying(target.dtype, target.device),
    }
    works = {key: case.run for key, case in cases.items()} | {(name, "", 0): p.run for name, p in probes.items()}
    with torch.no_grad():
        taken = time_in_turn(
            works, target.device, settings.patience, lambda done, most: progress("forwards", done, most)
        )
    ms = {key: median(values) for key, values in taken.items()}
    ceilings = Ceilings(**{name: probe.rate(taken[name, "", 0]) for name, probe in probes.items()})
    if ceilings.steadiness < STEADY:
        notes.append(
            f"the machine was busy: mere reads and products reached {ceilings.steadiness:.0%} of their best on the "
            "median, so times are too long; run this again with nothing beside it"
        )
    timed = {
        key: Timed(ms[key], ceilings.floor_ms(case.work), ceilings.bound(case.work)) for key, case in cases.items()
    }
    if any(piece.bound == "memory" and piece.efficiency > 1 for piece in timed.values()):
        notes.append("what has more than 100% was read faster than memory is, so that a part of it lay in a cache")
    return Profile(
        target=target.source.name,
        head=None if drafting is None else known_as(drafting.draft.path),
        dtype=str(target.dtype).removeprefix("torch."),
        device=target.device,
        threads=torch.get_num_threads(),
        context=usual,
        forward={length: {width: timed["forward", str(length), width] for width in widths} for length in contexts},
        output={width: timed["output", "", width] for width in widths},
        levels={name: value for (kind, name, _), value in timed.items() if kind == "head"},
        ceilings=ceilings,
        steps=steps,
        rounds=len(taken["peak", "", 0]),
        notes=tuple(notes),
        weights=target.weights,
    )


def _chosen(target: TargetModel, settings: ProfileSettings) -> tuple[list[int], list[int], list[str]]:
    """Widths and contexts, ascending, and what is left out of those that nobody asked for.

    Raises `TercelError` for what was asked for and the target does not take.
    """
    name, notes = target.source.name, []
    widths = sorted(set(settings.widths or WIDTHS))
    if not target.tree_support.chain and max(widths) > 1:
        if settings.widths is not None:
            target.tree_support.require_chain(name)
        widths = [1]
        notes.append(f"{name} is decoded token by token, so that no wider block is measured")
    limit, longest = target.context_length - max(widths), _room(target)
    if settings.contexts is not None:
        contexts = sorted(set(settings.contexts))
        if contexts[-1] > limit:
            raise TercelError(
                f"a context of {contexts[-1]:,} tokens and a block of {max(widths):,} do not fit into {name}, which "
                f"takes {target.context_length:,}{target.why_no_longer}; ask for shorter ones"
            )
        if longest is not None and contexts[-1] > longest:
            raise TercelError(
                f"a context of {contexts[-1]:,} tokens does not fit into memory, of which there is enough for about "
                f"{longest:,}; ask for a shorter one"
            )
        return widths, contexts, notes
    usual = settings.usual_contexts
    fits = [length for length in usual if length <= limit and (longest is None or length <= longest)]
    if left := [length for length in usual if length not in fits]:
        why = f"{name} takes {target.context_length:,} tokens" if left[0] > limit else "memory is short"
        notes.append(f"contexts of {', '.join(map(str, left))} tokens are left out: {why}")
    if not fits and limit < 1:
        raise TercelError(f"{name} takes {target.context_length} tokens, too few for blocks of {max(widths)}")
    return widths, fits or [limit if longest is None else min(limit, longest)], notes


def _room(target: TargetModel) -> int | None:
    """How long a context may be whose keys and values take a quarter of the free memory: shorter ones stand beside."""
    free, each = available_memory(target.device), target.work.cache_bytes(1)
    return None if free is None or not each else max(1, free // (4 * each))


def _time_steps(
    target: TargetModel,
    proposers: Mapping[str, Proposer],
    prompts: Sequence[Prompt],
    params: SamplingParams,
    progress: OnProgress,
) -> dict[str, Steps]:
    """Every prompt answered with every proposer, in turn, as long as it leaves room for an answer."""
    fitting = [prompt for prompt in prompts if len(prompt.tokens) < target.context_length]
    if not fitting:
        raise TercelError(
            f"every prompt fills the context of {target.source.name} ({target.context_length} tokens); name --tasks "
            "with shorter ones"
        )
    names = list(proposers)
    results: dict[str, list[GenerationResult]] = {name: [] for name in names}
    for name in names:
        _answer(target, proposers[name], fitting[0], SamplingParams(max_new_tokens=WARM_UP_TOKENS))
    for number, prompt in enumerate(fitting):
        first = number % len(names)
        for place, name in enumerate(names[first:] + names[:first], 1):
            results[name].append(_answer(target, proposers[name], prompt, params))
            progress("steps", number * len(names) + place, len(fitting) * len(names))
    return {name: _steps(target, results[name]) for name in names}


def _answer(target: TargetModel, proposer: Proposer, prompt: Prompt, params: SamplingParams) -> GenerationResult:
    loop = DecodingLoop(target, proposer, clock=PhaseClock(target.device, fine=True))
    loop.submit(Request(prompt.tokens, params))
    while True:
        for event in loop.step():
            if event.result is not None:
                return event.result.require()


def _steps(target: TargetModel, results: Sequence[GenerationResult]) -> Steps:
    ran = [result for result in results if result.steps]
    if not ran:
        raise TercelError(
            f"{target.source.name} ends every answer with its first token, so that there is no step to measure; name "
            "other --tasks, or a longer --max-new-tokens"
        )
    whole, steps = [sum(result.split.values()) for result in ran], [result.steps for result in ran]
    spent = {phase: [result.split[phase] for result in ran] for phase in PHASES}
    return Steps(
        ms={phase: _over([1e3 * value for value in spent[phase]], steps) for phase in PHASES},
        share={phase: _over(spent[phase], whole) for phase in PHASES},
        tau=_over([tokens_of_steps(result.tokens) for result in ran], steps),
        nodes=sum(result.nodes for result in ran) / sum(steps),
        context=sum(result.prompt_tokens + len(result.tokens) / 2 for result in ran) / len(ran),
        steps=sum(steps),
    )


def _over(spent: Sequence[float], by: Sequence[float]) -> Interval:
    """Totals over totals, the interval over answers; of a phase that never was, nothing."""
    return ratio_of_totals(spent, by) if any(spent) else Interval(0.0, *(2 * [math.nan if len(spent) < 2 else 0.0]))
