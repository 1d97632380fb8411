"""`tercel bench`: the same questions answered by several methods, in pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tercel import limits
from tercel.cli.consoles import PlainConsole, counting_bar, result_console, say
from tercel.cli.entrants import entries_of, make_entry, names_asked, open_heads
from tercel.cli.groups import with_groups
from tercel.cli.models import open_draft_model, open_sampling, open_target, say_notes
from tercel.cli.options import (
    DataDirs,
    DecodingModelOptions,
    DraftOptions,
    HeadName,
    HeadsFile,
    JsonFile,
    PlotFile,
    TargetName,
    TaskList,
)
from tercel.cli.paths import user_path
from tercel.cli.sampling_options import FollowConfig, Sample, Temperatures, parse_temperatures
from tercel.decode.proposers import EAGLE3, VANILLA, make_proposer
from tercel.errors import TercelError
from tercel.files import write_json, write_text
from tercel.heads import known_as
from tercel.measure.available import TRANSFORMERS
from tercel.stopping import stopped

if TYPE_CHECKING:
    from tercel.decode.sampling import SamplingParams
    from tercel.draft import DraftModel
    from tercel.draft.acceptance import NAlpha
    from tercel.measure.bench import BenchProgress, BenchSettings
    from tercel.measure.bench_journal import Journal
    from tercel.measure.methods import Method
    from tercel.measure.summary import BenchReport
    from tercel.measure.tasks import Task
    from tercel.target_model.model import Target

METHODS = (VANILLA, TRANSFORMERS, EAGLE3)


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
    heads: HeadsFile = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens per answer.")] = 128,
    temperature: Temperatures = None,
    sample: Sample = False,
    seed: Annotated[int, typer.Option(help="Makes sampling repeatable.")] = 0,
    repeats: Annotated[
        int,
        typer.Option(
            min=1, max=limits.REPEATS, help="How often every question is asked, each time with a seed of its own."
        ),
    ] = 1,
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
    csv_file: Annotated[
        Path | None,
        typer.Option("--csv", metavar="FILE", parser=user_path, help="Write the table there.", show_default=False),
    ] = None,
    html_file: Annotated[
        Path | None,
        typer.Option(
            "--html", metavar="FILE", parser=user_path, help="Write a page with plots there.", show_default=False
        ),
    ] = None,
    plot: PlotFile = None,
    generation_config: FollowConfig = True,
) -> None:
    """Measure speed and acceptance on tasks, with 95 % intervals; the same command resumes a stopped run."""
    names, entries = names_asked(methods, target, head, draft, heads)
    drafting = [entry.method for entry in entries.values()]
    if EAGLE3 in drafting:
        draft.require_head_drafts()
    draft.require_use_of_model(*drafting)
    if record and EAGLE3 not in names:
        raise TercelError("--record needs eagle3 among --methods: there is no head's result to keep")
    from tercel.decode.generation_config import Asked
    from tercel.measure.bench import BenchSettings
    from tercel.measure.bench_journal import journal_of, open_journal
    from tercel.measure.entrants import make_methods, names_of_heads, proposers_of, what_answers_depend_on
    from tercel.measure.record import require_recordable
    from tercel.measure.report import check_picture
    from tercel.measure.tasks import parse_tasks

    if plot is not None:
        check_picture(plot)
    wanted = [
        Asked({"temperature": warmth, "seed": seed, "max_new_tokens": max_new_tokens}, sample, generation_config)
        for warmth in parse_temperatures(temperature)
    ]
    asked = parse_tasks(tasks, tuple(data_dir or ()))
    loaded = open_target(target, model)
    params = [open_sampling(each, loaded) for each in wanted]
    opened = open_heads(loaded, draft)
    if n_alpha and EAGLE3 not in entries:
        entries = {**entries, **entries_of([EAGLE3], {}, head)}
    own_head = opened.of(entries[EAGLE3]) if EAGLE3 in entries else None
    if record and own_head is not None:
        require_recordable(own_head)
    second = open_draft_model(loaded, draft)
    compared = make_methods(names, entries, loaded, opened, lambda *parts: make_entry(draft, *parts), second)
    named = names_of_heads({name: entries[name] for name in names if name in entries}, opened)
    settings = BenchSettings(params[0], repeats, None if own_head is None else known_as(own_head.path), named)
    outputs = Outputs(json_file, csv_file, html_file, plot)
    shaped = {name: replace(entry, tree=entry.tree or draft.tree) for name, entry in entries.items()}
    key = what_answers_depend_on(loaded, shaped, opened, second, asked, params[0])
    with open_journal(journal_of(*outputs.files), key) as journal:
        if journal.kept:
            say(f"note: going on behind {journal.kept:,} answers that {journal.path} keeps")
        try:
            reports = [
                run_with_bar(loaded, compared, asked, replace(settings, params=each), journal) for each in params
            ]
        except KeyboardInterrupt as stop:
            if journal.kept:
                kept = f"stopped; {journal.path} keeps {journal.kept:,} answers; the same command goes on with them"
                raise stopped(stop, kept) from None
            raise
        if n_alpha and own_head is not None:
            reports = [
                replace(report, n_alpha=measure_n_alpha(loaded, own_head, asked, each, n_alpha))
                for report, each in zip(reports, params, strict=True)
            ]
        try:  # files first: a screen may fail
            outputs.write(reports)
            if record and own_head is not None:
                for report in reports:
                    keep_with_head(report, own_head, draft, loaded)
            journal.done()
        finally:
            print_reports(result_console(*outputs.files), reports)
            say_notes(*proposers_of(compared))


@dataclass(frozen=True)
class Outputs:
    """Files that a benchmark's result goes to, None where it is not wanted."""

    json: Path | None
    csv: Path | None
    html: Path | None
    plot: Path | None

    @property
    def files(self) -> tuple[Path | None, ...]:
        return self.json, self.csv, self.html, self.plot

    def write(self, reports: Sequence[BenchReport]) -> None:
        """Raises `TercelError` if a file cannot be written."""
        from tercel.measure.bench_page import bench_page
        from tercel.measure.report import csv_text, plot_bench, report_json

        if self.json is not None:
            write_json(self.json, report_json(reports))
        if self.csv is not None:
            write_text(self.csv, csv_text(reports))
        if self.html is not None:
            write_text(self.html, bench_page(reports))
        if self.plot is not None:
            plot_bench(reports, self.plot)


def print_reports(console: PlainConsole, reports: Sequence[BenchReport]) -> None:
    """Table and notes of every temperature, and where several tasks were asked the layout of the paper's Table 1."""
    from tercel.measure.report import bench_table, table1_text
    from tercel.measure.table import LEGEND, table1

    for report in reports:
        console.print(bench_table(report))
        for line in notes(report):
            console.print_line(line)
    if len(reports) > 1 or len(reports[0].tasks) > 1:
        for report in reports:
            console.print(table1_text(table1(report)))
        console.print_line(LEGEND)


def keep_with_head(report: BenchReport, model: DraftModel, options: DraftOptions, target: Target) -> None:
    """Record the result with the head. Raises `TercelError` if it cannot be written."""
    from tercel.draft.shape import SIZED
    from tercel.measure.record import decoding_entry
    from tercel.measure.record import record as write_record

    write_record(model, decoding_entry(report, str(options.shape or SIZED)))


def run_with_bar(
    target: Target,
    methods: Mapping[str, Method],
    tasks: Sequence[Task],
    settings: BenchSettings,
    journal: Journal | None = None,
) -> BenchReport:
    """`run_bench` with a bar on standard error."""
    from tercel.measure.bench import run_bench

    with counting_bar("answers") as bar:

        def show(answer: BenchProgress) -> None:
            rate = f"{answer.task}, {answer.method}: {len(answer.run.tokens) / answer.run.seconds:.1f} tokens/s"
            bar(answer.done, answer.total, rate)

        return run_bench(target, methods, tasks, settings, show, journal)


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
    if report.sittings > 1:
        lines.append(f"The times are of {report.sittings} sittings: the benchmark was interrupted.")
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
