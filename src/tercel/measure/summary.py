"""From the runs of a benchmark to its numbers: one summary a method and task, one report a benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tercel.decode.proposers import VANILLA
from tercel.decode.sampling import SamplingParams
from tercel.draft.acceptance import NAlpha, tokens_of_steps
from tercel.measure.available import TRANSFORMERS
from tercel.measure.intervals import Interval, mean_of_ratios, proportion, ratio_of_totals, speedup
from tercel.measure.methods import Run
from tercel.target_model.backend_names import TORCH


@dataclass(frozen=True)
class QuestionRow:
    """All runs of one question: for each method one run a turn and repetition, in the same order."""

    id: str
    runs: Mapping[str, tuple[Run, ...]]

    def tokens(self, method: str) -> int:
        return sum(len(run.tokens) for run in self.runs[method])

    def seconds(self, method: str) -> float:
        return sum(run.seconds for run in self.runs[method])

    def drafted_tokens(self, method: str) -> int:
        """What `steps` forwards have appended."""
        return sum(tokens_of_steps(run.tokens) for run in self.runs[method])

    def steps(self, method: str) -> int:
        return sum(run.steps for run in self.runs[method])

    def identical(self, method: str) -> bool:
        """Whether every answer has the very token ids of token-by-token decoding."""
        return all(run.tokens == base.tokens for run, base in zip(self.runs[method], self.runs[VANILLA], strict=True))

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "methods": {
                method: {
                    "tokens": [len(run.tokens) for run in runs],
                    "seconds": [run.seconds for run in runs],
                    "steps": [run.steps for run in runs],
                    "accepted": [list(run.accepted) for run in runs],
                    "identical": self.identical(method),
                }
                for method, runs in self.runs.items()
            },
        }


@dataclass(frozen=True)
class MethodSummary:
    """One method on one task.

    tau: acceptance length; None if every answer ended with its first token. speedup: over token-by-token decoding by
    the same loop; speedup_per_question: the mean of the questions' own ratios. identical: share of questions answered
    with the same token ids as `vanilla` (None where they need not be: stock sampling). questions: how many were asked.
    lossy: the rule by which drafts were accepted, if that changes the text.
    """

    tokens: int
    seconds: float
    rate: Interval
    tau: Interval | None
    speedup: Interval
    speedup_per_question: Interval
    over_transformers: Interval | None
    identical: Interval | None
    questions: int
    lossy: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "seconds": self.seconds,
            **_entry("tokens_per_s", self.rate),
            **_entry("tau", self.tau),
            **_entry("speedup", self.speedup),
            **_entry("speedup_per_question", self.speedup_per_question),
            **_entry("speedup_vs_transformers", self.over_transformers),
            **_entry("identical", self.identical),
            "questions": self.questions,
            "lossy": self.lossy,
        }


@dataclass(frozen=True)
class TaskResult:
    """skipped: ids of questions (`id`, or `id, turn N`) whose prompt fills the target's context."""

    name: str
    methods: Mapping[str, MethodSummary]
    rows: tuple[QuestionRow, ...]
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True)
class BenchReport:
    """Everything a benchmark found. time_split_ms: method → phase → milliseconds a step. template_arguments: what
    prompts were rendered with beside the messages. backend: what computed the target's blocks. weights: those of the
    target, if they are not its own. heads: by method. sittings: of how many runs of
    the program the times are, more than one if it was interrupted."""

    target: str
    head: str | None
    dtype: str
    device: str
    threads: int
    tasks: tuple[TaskResult, ...]
    time_split_ms: Mapping[str, Mapping[str, float]]
    params: SamplingParams
    repeats: int
    versions: Mapping[str, str]
    timestamp: str
    n_alpha: NAlpha | None = None
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    backend: str = TORCH
    weights: str | None = None
    heads: Mapping[str, str] = field(default_factory=dict)
    sittings: int = 1

    @property
    def same_bits(self) -> bool:
        """Whether every drafted answer that could be has the very token ids of token-by-token decoding."""
        return all(
            row.identical(name)
            for task in self.tasks
            for name, summary in task.methods.items()
            if name != TRANSFORMERS and summary.identical is not None and summary.lossy is None
            for row in task.rows
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "target": self.target,
            "head": self.head,
            "heads": dict(self.heads),
            "dtype": self.dtype,
            "device": self.device,
            "backend": self.backend,
            "weights": self.weights,
            "threads": self.threads,
            "template_arguments": dict(self.template_arguments),
            "tasks": {
                task.name: {name: summary.to_json() for name, summary in task.methods.items()} for task in self.tasks
            },
            "same_bits": self.same_bits,
            "n_alpha": [] if self.n_alpha is None else list(self.n_alpha.alpha),
            "n_alpha_seen": [] if self.n_alpha is None else list(self.n_alpha.seen),
            "time_split_ms": {method: dict(split) for method, split in self.time_split_ms.items()},
            "questions": {task.name: [row.to_json() for row in task.rows] for task in self.tasks},
            "skipped": {task.name: list(task.skipped) for task in self.tasks if task.skipped},
            "settings": {**asdict(self.params), "repeats": self.repeats},
            "versions": dict(self.versions),
            "timestamp": self.timestamp,
            "sittings": self.sittings,
        }


def summarise(
    rows: Sequence[QuestionRow], comparable: Mapping[str, bool], lossy: Mapping[str, str | None]
) -> dict[str, MethodSummary]:
    """Numbers of every method over the same questions.

    comparable: by method, whether its token ids should equal vanilla's; lossy: by which rule its drafts were accepted,
    if that changes the text. Intervals resample questions; repetitions of a question are added up before.
    """
    return {method: _summary(rows, method, comparable[method], lossy[method]) for method in comparable}


def time_split_ms(rows: Sequence[QuestionRow], method: str) -> dict[str, float]:
    """Milliseconds a step of each phase; empty for methods that do not say."""
    runs = [run for row in rows for run in row.runs[method]]
    steps = sum(run.steps for run in runs)
    phases = dict.fromkeys(phase for run in runs for phase in run.split)
    return {phase: 1e3 * sum(run.split.get(phase, 0.0) for run in runs) / max(steps, 1) for phase in phases}


def _summary(rows: Sequence[QuestionRow], method: str, comparable: bool, lossy: str | None) -> MethodSummary:
    tokens = [row.tokens(method) for row in rows]
    seconds = [row.seconds(method) for row in rows]
    drafted, steps = [row.drafted_tokens(method) for row in rows], [row.steps(method) for row in rows]
    rates = [count / spent for count, spent in zip(tokens, seconds, strict=True)]
    base_rates = [row.tokens(VANILLA) / row.seconds(VANILLA) for row in rows]
    same = sum(row.identical(method) for row in rows)
    return MethodSummary(
        tokens=sum(tokens),
        seconds=sum(seconds),
        rate=ratio_of_totals(tokens, seconds),
        tau=ratio_of_totals(drafted, steps) if sum(steps) else None,
        speedup=_speedup(rows, method, VANILLA),
        speedup_per_question=mean_of_ratios(rates, base_rates),
        over_transformers=_speedup(rows, method, TRANSFORMERS) if TRANSFORMERS in rows[0].runs else None,
        identical=proportion(same, len(rows)) if comparable else None,
        questions=len(rows),
        lossy=lossy,
    )


def _speedup(rows: Sequence[QuestionRow], method: str, base: str) -> Interval:
    return speedup(
        [row.tokens(method) for row in rows],
        [row.seconds(method) for row in rows],
        [row.tokens(base) for row in rows],
        [row.seconds(base) for row in rows],
    )


def _entry(name: str, interval: Interval | None) -> dict[str, Any]:
    """`name` and `name_ci95`, null where unknown."""
    if interval is None:
        return {name: None, f"{name}_ci95": None}
    return {name: interval.value, f"{name}_ci95": interval.ci95}
