"""`tercel serve-command`: the line that starts an engine with a head."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from tercel import limits
from tercel.cli.consoles import fetching_bar, result_console, say
from tercel.cli.options import Dtype, JsonFile, LayerIds, LayerIdsOption, OnlyHead
from tercel.cli.paths import tercel_command, user_name
from tercel.errors import TercelError
from tercel.files import write_json
from tercel.heads import resolve_head
from tercel.interop.engines import ENGINES, as_given

STARTED = {name: engine for name, engine in ENGINES.items() if engine.serve_command}
_TREES = [engine for engine in STARTED.values() if engine.drafts_trees]
_TREES_OF = ", ".join(engine.title for engine in _TREES)
if TYPE_CHECKING:  # which sees no members that come from a list
    StartedEngine = StrEnum
else:
    StartedEngine = StrEnum("StartedEngine", {name: name for name in STARTED})


def command(
    head: OnlyHead,
    engine: Annotated[StartedEngine, typer.Option(help="The engine that will serve.", show_default=False)],
    target: Annotated[
        str | None,
        typer.Option(
            metavar="TARGET",
            parser=user_name,
            help="The target as the engine will load it: a folder or a name of the Hub.",
            show_default="the one HEAD records",
        ),
    ] = None,
    depth: Annotated[int, typer.Option(min=1, max=limits.DRAFT_DEPTH, help="Tokens drafted one after another.")] = 4,
    top_k: Annotated[
        int,
        typer.Option(
            min=1, max=limits.DRAFT_TOP_K, help=f"Branches of a node: more than 1 is a tree ({_TREES_OF})."
        ),
    ] = 1,
    nodes: Annotated[
        int | None,
        typer.Option(
            min=2,
            max=limits.DRAFT_NODES,
            help="Tokens verified at once, root included.",
            show_default="all that are drafted",
        ),
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="Data type the engine computes in.")] = Dtype.bfloat16,
    layer_ids: LayerIdsOption = LayerIds.auto,
    json_file: JsonFile = None,
) -> None:
    """Print the line that starts an engine with HEAD and its speculation settings.

    A warning on standard error says if the engine would read this folder otherwise than it is meant, and which
    `tercel export` to run first.
    """
    if not ENGINES[engine.value].drafts_trees and (top_k > 1 or nodes is not None):
        other = " or ".join(tree.name for tree in _TREES)
        raise TercelError(f"{engine.value} drafts only chains; leave out --top-k and --nodes, or take --engine {other}")
    path = resolve_head(head, head).absolute()  # a wrong name is told before torch is imported
    from tercel.draft.binding import fitted
    from tercel.draft.shape import TreeShape
    from tercel.interop.misread import misread_by
    from tercel.interop.served_target import read_beside

    with fetching_bar() as on_bytes:
        model, served = read_beside(path, target, layer_ids.meaning, on_bytes, ask_hub=False)
    model, warnings = fitted(model, served)
    loaded_as = as_given(engine.value, model.format)
    shape = TreeShape(top_k, depth, nodes or 1 + depth * top_k)
    line = loaded_as.launch(str(path), served.address, shape, dtype.value)
    doubt = misread_by(loaded_as, model, path, served.model_type)
    if doubt is not None:
        warnings += (_misread(doubt, head, engine.value),)
    warning = f"warning: {'; '.join(warnings)}" if warnings else None
    if json_file is not None:
        write_json(
            json_file, {"engine": engine.value, "target": served.address, "command": line, "warning": warning}
        )
    result_console(json_file).print_text([(f"{line}\n", "")])
    if warning is not None:
        say(warning)


def _misread(doubt: str, head: str, engine: str) -> str:
    export = tercel_command("export", head, "--to", engine, "--out", "DIR")
    return f"{engine} would not load this folder as it is meant ({doubt}); run `{export}` first, serve DIR"
