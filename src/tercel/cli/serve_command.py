"""`tercel serve-command`: the line that starts an engine with a head."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tercel import limits
from tercel.cli.consoles import fetching_bar, result_console, say
from tercel.cli.options import Dtype, JsonFile, LayerIds, LayerIdsOption, OnlyHead
from tercel.cli.paths import tercel_command, user_name
from tercel.errors import TercelError
from tercel.files import write_json
from tercel.heads import resolve_head
from tercel.interop.deployment import Deployment
from tercel.interop.engines import ENGINES, as_given
from tercel.interop.engines.base import Layout

STARTED = {name: engine for name, engine in ENGINES.items() if engine.serve_command}
_TREES = [engine for engine in STARTED.values() if engine.drafts_trees]
_TREES_OF = ", ".join(engine.title for engine in _TREES)
_GPUS = 4096
_SPREAD: dict[str, Any] = {"rich_help_panel": "Beyond one GPU"}
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
        typer.Option(min=1, max=limits.DRAFT_TOP_K, help=f"Branches of a node: more than 1 is a tree ({_TREES_OF})."),
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
    tensor: Annotated[
        int, typer.Option("--tensor-parallel", min=1, max=_GPUS, help="GPUs that share every layer.", **_SPREAD)
    ] = 1,
    pipeline: Annotated[
        int, typer.Option("--pipeline-parallel", min=1, max=_GPUS, help="Stages that share the layers.", **_SPREAD)
    ] = 1,
    data: Annotated[
        int, typer.Option("--data-parallel", min=1, max=_GPUS, help="Copies of the target.", **_SPREAD)
    ] = 1,
    machines: Annotated[
        int, typer.Option(min=1, max=_GPUS, help="With as many GPUs each, and a line for each.", **_SPREAD)
    ] = 1,
    address: Annotated[
        str | None,
        typer.Option(metavar="HOST", help="Where machines reach the first one.", show_default=False, **_SPREAD),
    ] = None,
    container: Annotated[
        bool, typer.Option("--container", help="Print lines for Docker, with HEAD mounted.", **_SPREAD)
    ] = False,
    compose: Annotated[
        bool, typer.Option("--compose", help="Print a compose.yaml, with HEAD mounted.", **_SPREAD)
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Print the line that starts an engine with HEAD and its speculation settings, on one GPU, several or several
    machines.

    A warning on standard error says if the engine would read this folder otherwise than it is meant, and which
    `tercel export` to run first.
    """
    if not ENGINES[engine.value].drafts_trees and (top_k > 1 or nodes is not None):
        other = " or ".join(tree.name for tree in _TREES)
        raise TercelError(f"{engine.value} drafts only chains; leave out --top-k and --nodes, or take --engine {other}")
    layout = Layout(tensor, pipeline, data, machines, address)
    if container and compose:
        raise TercelError("both --container and --compose are given; give one of them")
    path = _from_root(resolve_head(head, head))  # a wrong name is told before torch is imported
    from tercel.draft.binding import fitted
    from tercel.draft.shape import TreeShape
    from tercel.interop.misread import misread_by
    from tercel.interop.served_target import read_beside

    with fetching_bar() as on_bytes:
        model, served = read_beside(path, target, layer_ids.meaning, on_bytes, ask_hub=False)
    model, warnings = fitted(model, served)
    loaded_as = as_given(engine.value, model.format)
    shape = TreeShape(top_k, depth, nodes or 1 + depth * top_k)
    folder = Path(served.address)
    own = folder.is_dir()
    address_there = str(_from_root(folder)) if own and (container or compose) else served.address
    line = loaded_as.launch(str(path), address_there, shape, dtype.value)
    read = (path, *((_from_root(folder),) if own else ()))
    deployment = Deployment(loaded_as, line, read, not own, layout)
    lines = deployment.container_lines() if container else deployment.lines()
    text = deployment.compose() if compose else _numbered(lines, layout)
    doubt = misread_by(loaded_as, model, path, served.model_type)
    if doubt is not None:
        warnings += (_misread(doubt, head, engine.value),)
    warning = f"warning: {'; '.join(warnings)}" if warnings else None
    if json_file is not None:
        write_json(
            json_file,
            {"engine": engine.value, "target": served.address, "command": lines[0], "warning": warning}
            | ({"commands": lines} if len(lines) > 1 else {})
            | ({"compose": text} if compose else {}),
        )
    result_console(json_file).print_text([(text, "")])
    if warning is not None:
        say(warning)


def _from_root(path: Path) -> Path:
    """The path as it is in a container too, where what `..` leads away from is not there."""
    return path.resolve() if ".." in path.parts else path.absolute()


def _numbered(lines: list[str], layout: Layout) -> str:
    """Lines to be copied, each with its machine where there are several."""
    if len(lines) == 1:
        return f"{lines[0]}\n"
    first = f", which the others reach at {layout.address}"
    return "".join(f"# machine {node}{'' if node else first}\n{line}\n" for node, line in enumerate(lines))


def _misread(doubt: str, head: str, engine: str) -> str:
    export = tercel_command("export", head, "--to", engine, "--out", "DIR")
    return f"{engine} would not load this folder as it is meant ({doubt}); run `{export}` first, serve DIR"
