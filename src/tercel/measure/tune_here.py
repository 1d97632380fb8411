"""Settings of this package's own decoding, tried on somebody's prompts within a given time."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

import torch

from tercel.decode.engine import Engine
from tercel.decode.proposer import Proposer
from tercel.decode.sampling import SamplingParams
from tercel.errors import TercelError
from tercel.measure.bench import Talk, warm_up
from tercel.measure.machine import describe, versions
from tercel.measure.methods import EngineMethod, Run
from tercel.measure.summary import VANILLA, QuestionRow
from tercel.measure.tasks import Question, Task
from tercel.measure.tune import (
    AUTO,
    KEPT,
    Clock,
    Measured,
    Search,
    Verdict,
    affordable,
    as_flags,
    measured,
    merged,
    search,
    size,
    verdict,
)
from tercel.target_model.protocol import TargetModel

MakeProposer = Callable[[str], Proposer]
OnAnswers = Callable[[float, float, str], None]


@dataclass(frozen=True)
class TuneSettings:
    """names: what is tried beside `KEPT`. params: how every question is answered (`seed` None counts as 0).
    slots: requests decoded at a time. minutes: for all that is measured. head: name for the report.

    Raises `TercelError` for a batch or a time that is none.
    """

    names: tuple[str, ...]
    params: SamplingParams
    slots: int = 1
    minutes: float = 5.0
    head: str | None = None

    def __post_init__(self) -> None:
        if self.slots < 1 or not 0 < self.minutes <= 24 * 60:
            raise TercelError(
                f"tuning takes 1 or more slots and at most a day, not {self.slots} slots and {self.minutes:g} minutes"
            )


@dataclass(frozen=True)
class Tuning:
    """What was tried here and came of it. prompts: questions that were there to ask; skipped: ids of those, or of
    their turns, that fill the context; left_out: settings for which there was no time."""

    target: str
    dtype: str
    device: torch.device
    backend: str
    weights: str | None
    threads: int
    settings: TuneSettings
    search: Search
    prompts: int
    skipped: tuple[str, ...]
    left_out: tuple[str, ...]
    timestamp: str

    @cached_property
    def verdict(self) -> Verdict:
        return verdict(self.search)

    @cached_property
    def measured(self) -> Mapping[str, Measured]:
        """Every setting over all that it was asked."""
        return {name: measured(name, self.search.rows_of(name)) for name in (*KEPT, *self._tried)}

    @cached_property
    def last(self) -> Mapping[str, Measured]:
        """Those of the last round, over that round alone."""
        rows = merged(self.search.last.rows)
        return {name: measured(name, rows) for name in self.search.last.settings}

    @property
    def _tried(self) -> tuple[str, ...]:
        """Chains first, by size."""
        names = [name for name in self.search.rounds[0].settings if name not in KEPT]
        return tuple(sorted(names, key=lambda name: (not name.startswith("chain:"), size(name))))

    @property
    def same_bits(self) -> bool:
        """Whether every drafted answer has the very token ids of the one without drafts."""
        return all(row.identical(name) for found in self.search.rounds for row in found.rows for name in row.runs)

    def notes(self) -> list[str]:
        found = []
        if self.left_out:
            found.append(
                f"in {self.settings.minutes:g} minutes there was no time for {len(self.left_out)} further settings "
                f"({', '.join(self.left_out)}); give more --minutes, or a lower --max-new-tokens"
            )
        if self.skipped:
            found.append(f"skipped as too long for the context: {', '.join(self.skipped)}")
        return found

    def to_json(self) -> dict[str, Any]:
        told = self.verdict
        return {
            "engine": "tercel",
            "target": self.target,
            "head": self.settings.head,
            "dtype": self.dtype,
            "device": str(self.device),
            "backend": self.backend,
            "weights": self.weights,
            "threads": self.threads,
            "machine": describe(self.device),
            "slots": self.settings.slots,
            "minutes": self.settings.minutes,
            "prompts": self.prompts,
            "settings": {name: {"flags": as_flags(name), **found.to_json()} for name, found in self.measured.items()},
            "rounds": [{"settings": list(r.settings), "asked": len(r.rows)} for r in self.search.rounds],
            "last_round": {name: found.to_json() for name, found in self.last.items()},
            "choice": self.search.choice,
            "over_vanilla": told.over_vanilla.value,
            "over_vanilla_ci95": told.over_vanilla.ci95,
            "over_auto": told.over_auto.value,
            "over_auto_ci95": told.over_auto.ci95,
            "use": told.setting,
            "flags": as_flags(told.setting),
            "sure": told.sure,
            "verdict": told.sentence,
            "same_bits": self.same_bits,
            "skipped": list(self.skipped),
            "left_out": list(self.left_out),
            "sampling": asdict(self.settings.params),
            "versions": versions(),
            "timestamp": self.timestamp,
        }


def tune(
    target: TargetModel,
    make: MakeProposer,
    tasks: Sequence[Task],
    settings: TuneSettings,
    progress: OnAnswers = lambda done, total, setting: None,
    clock: Clock = time.monotonic,
) -> Tuning:
    """Find the best of `settings.names` for the questions of `tasks`.

    make: the proposer of a setting, for as many rows as there are slots. progress: seconds gone and in all, and the
    setting that answers. Questions are asked in a mixed order, again from the beginning where time is left, with
    other seeds. A batch of questions counts as one: its rows end one after another, and the next follow.
    Raises `TercelError` if the target cannot verify drafts, or no question leaves room for an answer.
    """
    target.tree_support.require_chain(target.source.name)
    asked, skipped = _that_fit(target, tasks)
    started, budget = clock(), 60 * settings.minutes
    methods = {name: EngineMethod(Engine(target, make(name), slots=settings.slots)) for name in KEPT}

    def tell(setting: str) -> None:
        progress(min(clock() - started, budget), budget, setting)

    asking = _Asking(target, methods, asked, settings, tell)
    warm_up(target, {VANILLA: methods[VANILLA]}, settings.params)
    before = clock()
    asking.ask((VANILLA,))  # what an answer costs; drafts cost less, or at least not much more
    each = clock() - before
    names = affordable(settings.names, each, budget - (clock() - started))
    for name in names:
        methods[name] = EngineMethod(Engine(target, make(name), slots=settings.slots))
    warm_up(target, {name: methods[name] for name in (AUTO, *names)}, settings.params)
    found = search(names, asking.ask, budget - (clock() - started), clock)
    return Tuning(
        target=target.source.name,
        dtype=str(target.dtype).removeprefix("torch."),
        device=target.device,
        backend=target.backend,
        weights=target.weights,
        threads=torch.get_num_threads(),
        settings=settings,
        search=found,
        prompts=len(asked),
        skipped=(*skipped, *asking.skipped),
        left_out=tuple(name for name in settings.names if name not in names),
        timestamp=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _that_fit(target: TargetModel, tasks: Sequence[Task]) -> tuple[list[Question], list[str]]:
    """Questions in a mixed order, each called by its task too, and ids of those that fill the context."""
    named = [replace(q, id=f"{task.name}/{q.id}") for task in tasks for q in task.questions]
    random.Random(0).shuffle(named)
    talks = [Talk(target, question) for question in named]
    fit = [talk.question for talk in talks if talk.prompt() is not None]
    if not fit:
        raise TercelError(
            f"every prompt fills the context of {target.source.name} ({target.context_length} tokens); give shorter "
            "ones with --data"
        )
    return fit, [talk.skipped for talk in talks if talk.skipped is not None]


class _Asking:
    """Asks the next questions, as many at a time as there are slots."""

    def __init__(
        self,
        target: TargetModel,
        methods: Mapping[str, EngineMethod],
        questions: Sequence[Question],
        settings: TuneSettings,
        tell: Callable[[str], None],
    ) -> None:
        self.target, self.methods, self.questions = target, methods, questions
        self.settings, self.tell = settings, tell
        self.skipped: dict[str, None] = {}
        self._next, self._turns = 0, 0

    def ask(self, names: tuple[str, ...]) -> QuestionRow:
        """The next questions, answered with each setting; later turns follow the answers of the first in `names`."""
        places = range(self._next, self._next + self.settings.slots)
        self._next += self.settings.slots
        talks = [Talk(self.target, self.questions[place % len(self.questions)]) for place in places]
        params = [replace(self.settings.params, seed=(self.settings.params.seed or 0) + place) for place in places]
        runs: dict[str, list[Run]] = {name: [] for name in names}
        going = list(zip(talks, params, strict=True))
        while True:
            prompts = [(talk, prompt, with_seed) for talk, with_seed in going if (prompt := talk.prompt()) is not None]
            if not prompts:
                break
            turn = self._turn(names, [prompt for _, prompt, _ in prompts], [p for *_, p in prompts])
            for name in names:
                runs[name] += turn[name]
            for (talk, *_), run in zip(prompts, turn[names[0]], strict=True):
                talk.answered(run.tokens)
            going = [(talk, with_seed) for talk, _, with_seed in prompts]
        self.skipped |= {talk.skipped: None for talk in talks if talk.skipped is not None}
        return QuestionRow(" + ".join(talk.question.id for talk in talks), {n: tuple(r) for n, r in runs.items()})

    def _turn(
        self, names: Sequence[str], prompts: Sequence[tuple[int, ...]], params: Sequence[SamplingParams]
    ) -> dict[str, list[Run]]:
        """The order of settings rotates, so that none always comes first."""
        first = self._turns % len(names)
        self._turns += 1
        turn = {}
        for name in (*names[first:], *names[:first]):
            self.tell(name)
            turn[name] = self.methods[name].run_together(prompts, params)
        return turn
