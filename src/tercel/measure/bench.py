"""Paired timing: every question is answered by every method in turn, so that whatever slows the machine down
slows all of them (spec section 10)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

import torch

from tercel import limits
from tercel.chat.render import answer_text
from tercel.decode.sampling import SamplingParams
from tercel.errors import TercelError
from tercel.measure.bench_journal import Asked, Journal
from tercel.measure.machine import versions
from tercel.measure.methods import Method, Run
from tercel.measure.summary import (
    VANILLA,
    BenchReport,
    QuestionRow,
    TaskResult,
    summarise,
    time_split_ms,
)
from tercel.measure.tasks import Question, Task, prompt_ids
from tercel.target_model.protocol import TargetModel

WARM_UP = Question("warm-up", ("How does a heron catch fish in winter?",))
WARM_UP_TOKENS = 96  # so many that what is prepared on the way is ready
SEED_STRIDE = 1000  # repetitions of a question have seeds this far apart


@dataclass(frozen=True)
class BenchSettings:
    """params: how every question is answered (`seed` None counts as 0; at a temperature, question `i` of a
    task has seed `seed + i`). repeats: how often every question is asked, each time with a seed of its own; all
    repetitions count. head, heads: names for the report, of the one head and of those by method."""

    params: SamplingParams = field(default_factory=SamplingParams)
    repeats: int = 1
    head: str | None = None
    heads: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 1 <= self.repeats <= limits.REPEATS:
            raise TercelError(f"a benchmark has 1 to {limits.REPEATS:,} repetitions, not {self.repeats}")


@dataclass(frozen=True)
class BenchProgress:
    """One answer was given: `done` of `total` (an upper bound while questions may still be skipped)."""

    task: str
    question: str
    method: str
    run: Run
    done: int
    total: int


OnAnswer = Callable[[BenchProgress], None]


def run_bench(
    target: TargetModel,
    methods: Mapping[str, Method],
    tasks: Sequence[Task],
    settings: BenchSettings,
    progress: OnAnswer = lambda answer: None,
    journal: Journal | None = None,
) -> BenchReport:
    """Answer every question of `tasks` with every method and compare.

    methods: by name; `vanilla` (token by token through the same loop) must be there, `transformers` is the
    second yardstick if it is. The order of methods rotates from answer to answer. Later turns of a
    conversation follow vanilla's answers for every method, so that pairs stay pairs. One short warm-up of
    every method is not counted. journal: answers of an earlier run that are taken as they are, and where new ones are
    kept.

    Raises `TercelError` if `vanilla` or a task is missing, or if every question of a task fills the context.
    """
    if VANILLA not in methods:
        raise TercelError(f"a benchmark needs the method {VANILLA} to compare with; add it")
    if not tasks:
        raise TercelError("a benchmark needs at least one task")
    warm_up(target, methods, settings.params)
    journal = journal or Journal()
    asking = _Asking(target, methods, settings, progress, journal)
    asking.total = sum(len(q.turns) for task in tasks for q in task.questions) * settings.repeats * len(methods)
    results = tuple(asking.ask(task) for task in tasks)
    rows = [row for result in results for row in result.rows]
    splits = {name: time_split_ms(rows, name) for name in methods}
    return BenchReport(
        target=target.source.name,
        head=settings.head,
        heads=settings.heads,
        dtype=str(target.dtype).removeprefix("torch."),
        device=str(target.device),
        backend=target.backend,
        weights=target.weights,
        template_arguments=target.template_arguments,
        threads=torch.get_num_threads(),
        tasks=results,
        time_split_ms={name: split for name, split in splits.items() if split},
        params=settings.params,
        repeats=settings.repeats,
        versions=versions(),
        timestamp=datetime.now(UTC).isoformat(timespec="seconds"),
        sittings=journal.sittings,
    )


def warm_up(target: TargetModel, methods: Mapping[str, Method], params: SamplingParams) -> None:
    """A short answer of every method, which counts for nothing; what they need often is prepared. It is to no question
    that is measured: a method that drafts from past answers would know the answer."""
    before = target.expect_many()
    prompt = prompt_ids(target.tokenizer, WARM_UP)
    if len(prompt) >= target.context_length:
        prompt = prompt[: target.context_length // 2]
    for method in methods.values():
        method.run(prompt, replace(params, max_new_tokens=min(params.max_new_tokens, WARM_UP_TOKENS)))
    target.expect_many(before)


class Talk:
    """One question of several turns, whose later prompts hold the answers so far.

    skipped: id of the question, or of its turn, whose prompt fills the target's context; there the talk ends.
    """

    def __init__(self, target: TargetModel, question: Question) -> None:
        self.target, self.question = target, question
        self.skipped: str | None = None
        self._answers: list[str] = []

    def prompt(self) -> tuple[int, ...] | None:
        """Of the next turn; None if there is none."""
        number = len(self._answers)
        if number == len(self.question.turns):
            return None
        prompt = prompt_ids(self.target.tokenizer, self.question, self._answers)
        if len(prompt) < self.target.context_length:
            return prompt
        self.skipped = self.question.id if number == 0 else f"{self.question.id}, turn {number + 1}"
        return None

    def answered(self, tokens: Sequence[int]) -> None:
        self._answers.append(answer_text(self.target.tokenizer, tokens))


class _Asking:
    """Asks questions and counts answers."""

    def __init__(
        self,
        target: TargetModel,
        methods: Mapping[str, Method],
        settings: BenchSettings,
        progress: OnAnswer,
        journal: Journal,
    ) -> None:
        self.target, self.methods, self.settings, self.progress = target, methods, settings, progress
        self.journal = journal
        self.answers = 0
        self.total = 0
        self._asked = 0

    def ask(self, task: Task) -> TaskResult:
        skipped: dict[str, None] = {}
        rows = []
        for index, question in enumerate(task.questions):
            runs: dict[str, list[Run]] = {name: [] for name in self.methods}
            for repetition in range(self.settings.repeats):
                seed = (self.settings.params.seed or 0) + index + SEED_STRIDE * repetition
                params = replace(self.settings.params, seed=seed)
                for turn in self._conversation(task, index, params, skipped):
                    for name, run in turn.items():
                        runs[name].append(run)
            if runs[VANILLA]:
                rows.append(QuestionRow(question.id, {name: tuple(runs[name]) for name in runs}))
        if not rows:
            raise TercelError(
                f"every question of task {task.name} fills the context of {self.target.source.name} "
                f"({self.target.context_length} tokens); choose a task with shorter prompts"
            )
        greedy = self.settings.params.greedy
        comparable = {name: method.coupled or greedy for name, method in self.methods.items()}
        lossy = {name: method.lossy for name, method in self.methods.items()}
        return TaskResult(task.name, summarise(rows, comparable, lossy), tuple(rows), tuple(skipped))

    def _conversation(
        self, task: Task, number: int, params: SamplingParams, skipped: dict[str, None]
    ) -> Iterator[dict[str, Run]]:
        """Every turn's runs by method, until a prompt fills the context."""
        question, turn = task.questions[number], 0
        talk = Talk(self.target, question)
        while (prompt := talk.prompt()) is not None:
            asked = Asked(params.temperature, task.name, number, question.id, turn, params.seed or 0)
            runs = self._turn(asked, prompt, params)
            yield runs
            talk.answered(runs[VANILLA].tokens)
            turn += 1
        if talk.skipped is not None:
            skipped[talk.skipped] = None

    def _turn(self, asked: Asked, prompt: tuple[int, ...], params: SamplingParams) -> dict[str, Run]:
        names = list(self.methods)
        first = self._asked % len(names)
        self._asked += 1
        known = self.journal.runs(asked, self.methods)
        runs = known or {}
        for name in names[first:] + names[:first]:
            if known is None:
                runs[name] = self.methods[name].run(prompt, params)
                self.journal.add(asked, name, runs[name])
            self.answers += 1
            self.progress(BenchProgress(asked.task, asked.question, name, runs[name], self.answers, self.total))
        return runs
