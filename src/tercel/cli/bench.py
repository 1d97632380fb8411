"""`tercel bench`: the same questions answered by several methods, in pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from tercel import limits
from tercel.cli.consoles import counting_bar, result_console, say
from tercel.cli.groups import with_groups
from tercel.cli.models import (
    open_draft_model,
    open_head,
    open_sampling,
    open_target,
    ready_proposer,
    say_notes,
)
from tercel.cli.options import (
    DataDirs,
    DecodingModelOptions,
    DraftOptions,
    HeadName,
    JsonFile,
    PlotFile,
    TargetName,
    TaskList,
)
from tercel.cli.sampling_options import FollowConfig, Sample, Temperature
from tercel.decode.proposers import (
    EAGLE3,
    LOOKAHEAD,
    PLD,
    SPS,
    SUFFIX,
    VANILLA,
    check_known,
    make_proposer,
    proposer_kind,
)
from tercel.errors import TercelError
from tercel.files import write_json
from tercel.heads import known_as, shipped

if TYPE_CHECKING:
    from tercel.decode.proposer import Proposer
    from tercel.decode.sampling import SamplingParams
    from tercel.draft import DraftModel
    from tercel.draft.acceptance import NAlpha
    from tercel.measure.bench import BenchProgress, BenchSettings
    from tercel.measure.methods import Method
    from tercel.measure.summary import BenchReport
    from tercel.measure.tasks import Task
    from tercel.target_model.model import Target

TRANSFORMERS = "transformers"  # stock `generate()`, which is no proposer
METHODS = (VANILLA, TRANSFORMERS, EAGLE3)
ALL = "all"
EVERY = (VANILLA, TRANSFORMERS, SPS, PLD, SUFFIX, LOOKAHEAD, EAGLE3)


@with_groups
def command(
    target: TargetName,
    model: DecodingModelOptions,
    draft: DraftOptions,
    head: HeadName = None,
    tasks: TaskList = "demo",
    data_dir: DataDirs = None,
    methods: Annotated[
        str,
        typer.Option(
            help="What is compared (`tercel methods` lists them): vanilla is always needed, all means those whose head "
            "or model is there, MODULE:ATTRIBUTE is a method of your own."
        ),
    ] = ",".join(METHODS),
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens per answer.")] = 128,
    temperature: Temperature = None,
    sample: Sample = False,
    seed: Annotated[int, typer.Option(help="Makes sampling repeatable.")] = 0,
    repeats: Annotated[int, typer.Option(min=1, max=limits.REPEATS, help="How often every question is asked.")] = 1,
    n_alpha: Annotated[
        int,
        typer.Option(
            min=0, max=limits.DRAFT_DEPTH, help="Also measure n-α on a chain of that many drafts; 0 leaves it out."
        ),
    ] = 0,
    record: Annotated[
        bool, typer.Option("--record", help="Keep acceptance and speedup in the head's files and on its card.")
    ] = False,
    json_file: JsonFile = None,
    plot: PlotFile = None,
    generation_config: FollowConfig = True,
) -> None:
    """Measure speed and acceptance on tasks, with 95 % intervals."""
    names = every_method(target, head, draft) if methods == ALL else parse_methods(methods)
    if EAGLE3 in names:
        draft.require_head_drafts()
    draft.require_use_of_model(*(name for name in names if name != TRANSFORMERS))
    if record and EAGLE3 not in names:
        raise TercelError("--record needs eagle3 among --methods: there is no head's result to keep")
    from tercel.decode.generation_config import Asked
    from tercel.measure.bench import BenchSettings
    from tercel.measure.record import require_recordable
    from tercel.measure.report import bench_table, check_picture, plot_bench
    from tercel.measure.tasks import parse_tasks

    if plot is not None:
        check_picture(plot)
    given = {"temperature": temperature, "seed": seed, "max_new_tokens": max_new_tokens}
    wanted = Asked(given, sample, generation_config)
    asked = parse_tasks(tasks, tuple(data_dir or ()))
    loaded = open_target(target, model)
    params = open_sampling(wanted, loaded)
    drafting = n_alpha > 0 or any(
        proposer_kind(name).takes_head(head is not None) for name in names if name != TRANSFORMERS
    )
    draft_model = open_head(head, loaded, draft) if drafting else None
    if record and draft_model is not None:
        require_recordable(draft_model)
    settings = BenchSettings(params, repeats, known_as(draft_model.path) if draft_model is not None else None)
    compared = make_methods(names, loaded, draft_model, draft, open_draft_model(loaded, draft))
    report = run_with_bar(loaded, compared, asked, settings)
    if n_alpha and draft_model is not None:
        report = replace(report, n_alpha=measure_n_alpha(loaded, draft_model, asked, params, n_alpha))
    try:  # files first: a screen may fail
        if json_file is not None:
            write_json(json_file, report.to_json())
        if plot is not None:
            plot_bench(report, plot)
        if record and draft_model is not None:
            keep_with_head(report, draft_model, draft, loaded)
    finally:
        console = result_console(json_file, plot)
        console.print(bench_table(report))
        for line in notes(report):
            console.print_line(line)
        say_notes(*proposers_of(compared))


def every_method(target: str, head: str | None, options: DraftOptions) -> tuple[str, ...]:
    """All that has what it needs; says what is left out for want of it."""
    missing = {"head": head is None and shipped(target) is None, "model": options.draft_model is None}
    lacking = {
        name: need for name in EVERY if name != TRANSFORMERS for need in proposer_kind(name).needs if missing[need]
    }
    for name, need in lacking.items():
        say(f"note: {name} is left out: {'no head is given' if need == 'head' else 'no --draft-model is given'}")
    return tuple(name for name in EVERY if name not in lacking)


def parse_methods(text: str) -> tuple[str, ...]:
    """`"vanilla,eagle3"` to its names. Raises `TercelError` for an unknown one, and without vanilla."""
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    for name in names:
        check_known(name, (TRANSFORMERS,))
        if name != TRANSFORMERS:
            proposer_kind(name)
    if VANILLA not in names:
        raise TercelError(f"--methods {text!r} lacks vanilla, which the others are compared with; add it")
    return names


def make_methods(
    names: Sequence[str],
    target: Target,
    head: DraftModel | None,
    options: DraftOptions,
    model: Target | None = None,
) -> dict[str, Method]:
    """Methods by name; head, model: what those draft with that need one.

    Raises `TercelError` if a part that a method needs is missing.
    """
    from tercel.decode.engine import Engine
    from tercel.decode.oracle import Oracle
    from tercel.decode.proposer import innermost
    from tercel.measure.methods import EngineMethod, TransformersMethod

    methods: dict[str, Method] = {}
    for name in names:
        if name == TRANSFORMERS:
            methods[name] = TransformersMethod(target)
        else:
            proposer = ready_proposer(name, target, head, options, model=model)
            kind, rule = proposer_kind(name), proposer.lossy
            method = EngineMethod(
                Engine(target, proposer),
                coupled=not kind.draws and rule is None,
                lossy=None if rule is None else rule.title,
            )
            drafting = innermost(proposer)
            methods[name] = replace(method, rehearse=drafting.rehearse) if isinstance(drafting, Oracle) else method
    return methods


def proposers_of(methods: Mapping[str, Method]) -> list[Proposer]:
    from tercel.decode.engine import Engine
    from tercel.measure.methods import EngineMethod

    engines = [method.engine for method in methods.values() if isinstance(method, EngineMethod)]
    return [engine.proposer for engine in engines if isinstance(engine, Engine)]


def keep_with_head(report: BenchReport, model: DraftModel, options: DraftOptions, target: Target) -> None:
    """Record the result with the head. Raises `TercelError` if it cannot be written."""
    from tercel.draft.shape import SIZED
    from tercel.measure.record import decoding_entry
    from tercel.measure.record import record as write_record

    write_record(model, decoding_entry(report, str(options.shape or SIZED)))


def run_with_bar(
    target: Target, methods: dict[str, Method], tasks: Sequence[Task], settings: BenchSettings
) -> BenchReport:
    """`run_bench` with a bar on standard error."""
    from tercel.measure.bench import run_bench

    with counting_bar("answers") as bar:

        def show(answer: BenchProgress) -> None:
            rate = f"{answer.task}, {answer.method}: {len(answer.run.tokens) / answer.run.seconds:.1f} tokens/s"
            bar(answer.done, answer.total, rate)

        return run_bench(target, methods, tasks, settings, show)


def measure_n_alpha(
    target: Target, model: DraftModel, tasks: Sequence[Task], params: SamplingParams, depth: int
) -> NAlpha:
    """n-α for n = 0 … depth - 1 over the first turns of all questions."""
    from tercel.decode.engine import Engine
    from tercel.draft.shape import TreeShape
    from tercel.measure.acceptance import n_alpha
    from tercel.measure.tasks import first_prompts

    chain = Engine(target, make_proposer(EAGLE3, target, head=model, shape=TreeShape.chain(depth)))
    prompts = [p for p in first_prompts(target.tokenizer, tasks) if len(p.tokens) < target.context_length]
    with counting_bar("n-α") as bar:
        return n_alpha(chain, prompts, params, depth, lambda done, total: bar(done, total, ""))


def notes(report: BenchReport) -> list[str]:
    """What stands below the table: n-α, where a step's time goes, and what was skipped."""
    lines = []
    if report.n_alpha is not None:
        values = ("–" if value is None else f"{value:.3f}" for value in report.n_alpha.alpha)
        lines.append("n-α: " + " ".join(values))
    for method, split in report.time_split_ms.items():
        total = sum(split.values())
        parts = ", ".join(f"{phase} {ms:.2f}" for phase, ms in split.items())
        lines.append(f"{method}: {total:.2f} ms a step: {parts}")
    for task in report.tasks:
        if task.skipped:
            lines.append(f"{task.name}: skipped as too long for the context: {', '.join(task.skipped)}")
    if not report.same_bits:
        lines.append(
            "Some drafted texts part from vanilla's: where attention or products are not those of docs/exactness.md, "
            f"a block rounds otherwise than single tokens, and near ties in {report.dtype} fall the other way; "
            "`tercel verify` tells rounding from error."
        )
    return lines
