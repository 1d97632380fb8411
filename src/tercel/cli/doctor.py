"""`tercel doctor`: what may be wrong with a head before it serves, and whether a running server gets out of it what
is in it."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from tercel.cli.consoles import PlainConsole, counting_bar, result_console
from tercel.cli.groups import with_groups
from tercel.cli.models import open_target
from tercel.cli.options import DataDirs, HeadName, JsonFile, LayerIds, LayerIdsOption, ModelOptions, TargetName
from tercel.cli.paths import user_names
from tercel.errors import TercelError
from tercel.files import write_json
from tercel.interop.engines import ENGINES
from tercel.plain import visible

if TYPE_CHECKING:
    from tercel.doctor.compare import ServingReport
    from tercel.doctor.findings import CheckUp
    from tercel.draft import DraftModel
    from tercel.target_model.model import Target

TASKS = "demo:4"
_STYLES = {"ok": "green", "note": "", "warning": "yellow", "problem": "bold red"}


AUTO = "auto"
if TYPE_CHECKING:  # which sees no members that come from a list
    AskedEngine = StrEnum
else:
    _NAMES = (AUTO, *(name for name, engine in ENGINES.items() if engine.tells_counters))
    AskedEngine = StrEnum("AskedEngine", {name: name for name in _NAMES})


@with_groups
def command(
    target: TargetName,
    model: ModelOptions,
    head: HeadName = None,
    url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="A running server to compare with, such as http://localhost:8000."),
    ] = None,
    engine: Annotated[AskedEngine, typer.Option(help="What runs at --url.")] = AskedEngine(AUTO),
    tasks: Annotated[
        str | None,
        typer.Option(
            metavar="NAME_OR_FILE[:N],…", parser=user_names, help="What the server is asked.", show_default=TASKS
        ),
    ] = None,
    data_dir: DataDirs = None,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Maximum tokens per answer.")] = 64,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for an answer of the server.")] = 120.0,
    layer_ids: LayerIdsOption = LayerIds.auto,
    json_file: JsonFile = None,
) -> None:
    """Check a head beside its target: template, tokenizer, RoPE, positions, vocabulary, precision, layers, norms.

    With --url, the server's text and acceptance are compared with this package's on the same prompts, and the likely
    cause is named if they fall short. Exits with 1 if a problem is found. Computes in float32 unless told otherwise.
    """
    if url is None and tasks is not None:
        raise TercelError("--tasks is what a running server is asked; give its --url too")
    from tercel.doctor.clients import connect
    from tercel.doctor.examine import as_loaded, examine, fits, without_comparison
    from tercel.http.client import Http

    named = None if engine.value == AUTO else engine.value
    server = connect(Http.at(url, timeout), named) if url is not None else None  # before anything is loaded
    loaded = open_target(target, model, exact=True)
    draft = read_beside(head, loaded, layer_ids)
    runs = fits(draft, loaded)
    report = examine(draft, loaded)
    if runs:
        report = as_loaded(report, draft, loaded, server.engine if server is not None else engine.value)
    if server is not None:
        from tercel.doctor.compare import compare_with_server
        from tercel.draft.binding import bind
        from tercel.measure.tasks import parse_tasks

        questions = [q for task in parse_tasks(tasks or TASKS, tuple(data_dir or ())) for q in task.questions]
        if runs:
            bound = bind(draft, loaded)
            with counting_bar("answers") as bar:
                served = compare_with_server(
                    server, loaded, bound, questions, max_new_tokens, lambda done, total: bar(done, total, "")
                )
            report = with_server(report, served)
        else:
            report = without_comparison(report)
    try:
        if json_file is not None:
            write_json(json_file, report.to_json())
    finally:
        print_report(result_console(json_file), report)
    if not report.ok:
        raise typer.Exit(1)


def read_beside(name: str | None, target: Target, layer_ids: LayerIds) -> DraftModel:
    """The head as its files have it, in the target's precision, whether or not it fits the target.

    Raises `TercelError` if there is no such head, its files cannot be read, or it is none of EAGLE-3.
    """
    from tercel.heads import resolve_head
    from tercel.interop.formats.read import read_head

    model = read_head(
        resolve_head(name, target.source.name),
        dtype=target.dtype,
        device=str(target.device),
        num_layers=target.num_layers,
        layer_ids=layer_ids.meaning,
    )
    return replace(model, head=model.eagle3)


def with_server(report: CheckUp, served: ServingReport) -> CheckUp:
    return replace(report, findings=(*report.findings, *served.findings), server=served.to_json())


def print_report(console: PlainConsole, report: CheckUp) -> None:
    """One row a finding, its advice below; then how many there are of each kind."""
    table = Table("check", "", "found", title=f"{report.head} for {report.target}", title_justify="left")
    table.columns[2].overflow = "fold"
    for finding in report.findings:
        text = Text(visible(_sentence(finding.found)))
        if finding.advice:
            text.append(visible(f"\n→ {finding.advice}"), style="dim")
        table.add_row(finding.check, Text(finding.level, style=_STYLES[finding.level]), text)
    console.print(table)
    console.print_line(summary(report), "bold green" if report.ok else "bold red")


def summary(report: CheckUp) -> str:
    levels = [finding.level for finding in report.findings]
    counted = [f"{levels.count(level)} {level}{'s' * (levels.count(level) != 1)}" for level in ("problem", "warning")]
    return f"{', '.join(counted)} in {len(levels)} checks"


def _sentence(text: str) -> str:
    """With a capital letter, unless it begins with the name of something."""
    return text[:1].upper() + text[1:] if text.split(" ", 1)[0].isalpha() else text
