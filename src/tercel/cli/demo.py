"""`tercel demo`: the whole thing on the built-in target, in a few minutes on a laptop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from tercel.cli.answer import LEGEND, ColouredText
from tercel.cli.bench import METHODS, notes, run_with_bar
from tercel.cli.consoles import PlainConsole, result_console
from tercel.cli.entrants import entries_of, make_entry, open_heads
from tercel.cli.groups import with_groups
from tercel.cli.models import open_sampling, open_target, ready_proposer
from tercel.cli.options import DecodingModelOptions, DraftOptions, HeadName
from tercel.cli.paths import tercel_command, user_name, user_path
from tercel.decode.proposers import EAGLE3, VANILLA, make_proposer
from tercel.errors import TercelError
from tercel.files import write_json, write_text
from tercel.heads import known_as
from tercel.plain import visible

if TYPE_CHECKING:
    from tercel.decode.engine import Engine
    from tercel.decode.types import GenerationResult, Request
    from tercel.measure.summary import BenchReport

TARGET, STREAMED = "smollm2-135m", 3
PICTURE = "demo.png"
WIDE = 100  # columns that two answers side by side need


@with_groups
def command(
    model: DecodingModelOptions,
    draft: DraftOptions,
    target: Annotated[
        str, typer.Argument(metavar="[TARGET]", parser=user_name, help="The model that answers.")
    ] = TARGET,
    head: HeadName = None,
    questions: Annotated[int, typer.Option(min=1, help="Questions of the benchmark.")] = 6,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Maximum tokens per answer.")] = 64,
    out: Annotated[Path, typer.Option(metavar="DIR", parser=user_path, help="Where the results go.")] = Path(
        "out/demo"
    ),
) -> None:
    """Stream answers with and without drafts, measure both, and write what came out."""
    draft.require_head_drafts()
    draft.require_use_of_model(draft.method)
    from tercel.decode.engine import Engine
    from tercel.decode.generation_config import Asked
    from tercel.decode.types import Request
    from tercel.measure.bench import BenchSettings
    from tercel.measure.entrants import make_methods
    from tercel.measure.report import bench_table
    from tercel.measure.tasks import DEMO, load_task, prompt_ids

    console = result_console(record=True)
    loaded = open_target(target, model)
    heads = open_heads(loaded, draft)
    draft_model = heads.get(head)
    params = open_sampling(Asked({"max_new_tokens": max_new_tokens}), loaded)
    engines = {
        "token by token": Engine(loaded, make_proposer(VANILLA, loaded)),
        "EAGLE-3": Engine(loaded, ready_proposer(EAGLE3, loaded, draft_model, draft)),
    }
    console.print(LEGEND)
    for question in load_task(f"{DEMO}:{STREAMED}", ()).questions:
        console.print()
        console.print_line(f"> {question.turns[0]}", "bold")
        request = Request(prompt_ids(loaded.tokenizer, question), params)
        show_both(console, engines, request)
    settings = BenchSettings(params, head=known_as(draft_model.path))
    entries = entries_of(METHODS, {}, head)
    methods = make_methods(METHODS, entries, loaded, heads, lambda *parts: make_entry(draft, *parts))
    report = run_with_bar(loaded, methods, (load_task(f"{DEMO}:{questions}", ()),), settings)
    written = write_numbers(report, out)
    console.print()
    console.print(bench_table(report))
    for line in notes(report):
        console.print_line(line)
    own = tercel_command("train", target, "--data", "chats.jsonl", "--out", "runs/head")
    for line in ("", *written, write_page(console, report, out), "", "A head of your own:", own):
        console.print_line(line)


@dataclass(frozen=True)
class _Column:
    """One method's answer so far."""

    name: str
    text: Text
    result: GenerationResult | None

    def panel(self) -> Panel:
        done = self.result
        below = ""
        if done is not None and done.steps:
            below = f"{(len(done.tokens) - 1) / done.decode_seconds:.1f} tokens/s, τ {done.tau:.2f}"
        return Panel(self.text, title=self.name, subtitle=below)


def show_both(console: PlainConsole, engines: dict[str, Engine], request: Request) -> None:
    """One method after the other, never at once; in two columns where the terminal is wide enough."""
    columns = [_Column(name, Text(), None) for name in engines]
    if not console.is_terminal:
        for place, engine in enumerate(engines.values()):
            for column in _answer(columns[place], engine, request):
                columns[place] = column
        console.print(_layout(columns, console.width))
        return
    with Live(_layout(columns, console.width), console=console, refresh_per_second=12) as live:
        for place, engine in enumerate(engines.values()):
            for column in _answer(columns[place], engine, request):
                columns[place] = column
                live.update(_layout(columns, console.width))


def _answer(column: _Column, engine: Engine, request: Request):  # type: ignore[no-untyped-def]
    """The column after every event."""
    coloured = ColouredText(engine.target.tokenizer, request.params.stop)
    text = column.text
    for event in engine.stream([request]):
        text = text + Text.assemble(*((visible(piece), style) for piece, style in coloured.of(event)))
        yield _Column(column.name, text, None if event.result is None else event.result.require())


def _layout(columns: Sequence[_Column], width: int) -> Table | Group:
    if width < WIDE:
        return Group(*(column.panel() for column in columns))
    grid = Table.grid(expand=True)
    for _ in columns:
        grid.add_column(ratio=1)
    grid.add_row(*(column.panel() for column in columns))
    return grid


def write_numbers(report: BenchReport, out: Path) -> list[str]:
    """`demo.json` and, where matplotlib is installed, `demo.png`; returns a line for each."""
    from tercel.measure.report import plot_bench

    write_json(out / "demo.json", report.to_json())
    lines = [f"numbers  {out / 'demo.json'}"]
    try:
        plot_bench([report], out / PICTURE)
    except TercelError as error:
        return [*lines, f"no picture: {error}"]
    return [*lines, f"picture  {out / PICTURE}"]


def write_page(console: PlainConsole, report: BenchReport, out: Path) -> str:
    """`demo.html` with what was shown, and the benchmark; returns a line for it."""
    from markupsafe import Markup

    from tercel.measure.bench_page import bench_body
    from tercel.pages import page

    shown = console.export_html(inline_styles=True, clear=False, code_format=_SHOWN)
    write_text(out / "demo.html", page("tercel demo", Markup(shown) + bench_body([report])))
    return f"page     {out / 'demo.html'}"


# the colours of a terminal with a light ground
_SHOWN = """<pre style="color:{foreground};background:{background}"><code>{code}</code></pre>
"""
