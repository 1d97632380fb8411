"""`tercel serve-command`: the line that starts an engine with a head."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tercel import limits
from tercel.cli.consoles import fetching_bar, result_console, say
from tercel.cli.options import Dtype, JsonFile, LayerIds, LayerIdsOption, OnlyHead
from tercel.cli.paths import tercel_command, user_name
from tercel.errors import TercelError
from tercel.files import write_json
from tercel.interop.engines import ENGINES, as_given

if TYPE_CHECKING:
    from tercel.draft import DraftModel


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
    from tercel.draft.shape import TreeShape
    from tercel.heads import resolve_head
    from tercel.interop.formats.read import read_head
    from tercel.interop.misread import misread_by

    path = resolve_head(head, head).absolute()
    model = read_head(path, layer_ids=layer_ids.meaning)
    name, layers, kind = served_target(target, model)
    if layers is not None:
        placed = model.eagle3
        placed.config = placed.config.placed(layers)
        model = replace(model, head=placed)
    loaded_as = as_given(engine.value, model.format)
    shape = TreeShape(top_k, depth, nodes or 1 + depth * top_k)
    line = loaded_as.launch(str(path), name, shape, dtype.value)
    doubt = misread_by(loaded_as, model, path, kind)
    warning = None if doubt is None else _warning(doubt, head, engine.value)
    if json_file is not None:
        write_json(json_file, {"engine": engine.value, "target": name, "command": line, "warning": warning})
    result_console(json_file).print_text([(f"{line}\n", "")])
    if warning is not None:
        say(warning)


def served_target(given: str | None, model: DraftModel) -> tuple[str, int | None, str | None]:
    """What the engine loads as the target, how many layers that has, and its model type, as far as they can be known.

    Raises `TercelError` if no target is given or recorded, or if it is given and cannot be found.
    """
    from tercel.target_model.sources import load_config, resolve
    from tercel.target_model.wheels import BUILTIN

    recorded = model.info.target.name if model.info.target is not None else model.info.training.target_name
    name = given or recorded
    if not name:
        raise TercelError("the head does not record its target; give --target")
    here = name.lower() in BUILTIN or Path(name).exists()
    if not here:  # a name of the Hub, which the engine will fetch
        return name, model.head.config.target_num_layers, None
    with fetching_bar() as on_bytes:
        path = str(Path(resolve(name, on_bytes).path).absolute())
        config = load_config(name, progress=on_bytes).get_text_config()
    return path, config.num_hidden_layers, config.model_type


def _warning(doubt: str, head: str, engine: str) -> str:
    export = tercel_command("export", head, "--to", engine, "--out", "DIR")
    return f"warning: {engine} would not load this folder as it is meant ({doubt}); run `{export}` first, serve DIR"
