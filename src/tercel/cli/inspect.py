"""`tercel inspect`: what a head is, costs, and comes from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from tercel.cli.consoles import PlainConsole, counting_bar, result_console
from tercel.cli.groups import with_groups
from tercel.cli.models import open_target
from tercel.cli.options import DataDirs, JsonFile, LayerIds, LayerIdsOption, ModelOptions, OnlyHead
from tercel.cli.paths import user_name, user_names
from tercel.cli.probe_table import probe_table
from tercel.errors import TercelError
from tercel.files import write_json
from tercel.heads import resolve_head

if TYPE_CHECKING:
    from tercel.draft import DraftModel
    from tercel.draft.inspect import HeadReport
    from tercel.measure.probe import ProbeReport
    from tercel.target_model.model import Target

PROBE_TASKS = "demo:4"


@with_groups
def command(
    head: OnlyHead,
    model: ModelOptions,
    target: Annotated[
        str | None,
        typer.Option(
            metavar="TARGET",
            parser=user_name,
            help="The target to check it against.",
            show_default=False,
        ),
    ] = None,
    layer_ids: LayerIdsOption = LayerIds.auto,
    probe: Annotated[
        bool, typer.Option("--probe", help="Measure whether it was read as meant, on a few answers of --target.")
    ] = False,
    tasks: Annotated[
        str,
        typer.Option(metavar="NAME_OR_FILE[:N],…", parser=user_names, help="What the target answers for --probe."),
    ] = PROBE_TASKS,
    data_dir: DataDirs = None,
    json_file: JsonFile = None,
) -> None:
    """Explain a draft head in any format: shapes, cost, target, training, how its files were read, what seems wrong."""
    if probe and target is None:
        raise TercelError("--probe measures a head on its target's answers; give --target")
    path = resolve_head(head, head)  # a wrong name is told before torch is imported
    from tercel.decode.compat import load_draft
    from tercel.draft.inspect import inspect_head
    from tercel.interop.formats.files import read_weights
    from tercel.interop.formats.read import read_head

    loaded = open_target(target, model) if target is not None else None
    if loaded is None:
        draft = read_head(path, layer_ids=layer_ids.meaning)
    else:
        draft = load_draft(head, loaded, force=True, layer_ids=layer_ids.meaning)
    report = inspect_head(draft, read_weights(path).tensors)
    measured = measure(draft, loaded, tasks, data_dir) if probe and loaded is not None else None
    found: dict[str, Any] = report.to_json()
    if measured is not None:
        found["probe"] = measured.to_json()
    try:
        if json_file is not None:
            write_json(json_file, found)
    finally:
        print_report(result_console(json_file), report, measured)


def print_report(console: PlainConsole, report: HeadReport, measured: ProbeReport | None) -> None:
    console.print(tensor_table(report))
    console.print(fact_table(report))
    if report.conventions:
        console.print(convention_table(report))
    for warning in report.warnings:
        console.print_line(f"warning: {warning}", "yellow")
    if measured is not None:
        console.print(probe_table(measured))
        console.print_line(measured.verdict, "" if measured.holds else "bold yellow")


def measure(model: DraftModel, target: Target, tasks: str, data_dir: DataDirs) -> ProbeReport:
    """The head's acceptance as read, and with each reading changed."""
    from tercel.measure.probe import probe
    from tercel.measure.tasks import first_prompts, parse_tasks

    prompts = first_prompts(target.tokenizer, parse_tasks(tasks, tuple(data_dir or ())))
    with counting_bar("answers") as bar:
        return probe(model, target, prompts, progress=lambda done, total: bar(done, total, ""))


def convention_table(report: HeadReport) -> Table:
    """What formats disagree on, as it was read."""
    table = Table("what formats disagree on", "read as", "because", title=f"format: {report.format}")
    table.title_justify = "left"
    for column in table.columns:
        column.overflow = "fold"
    for convention in report.conventions:
        table.add_row(convention.name, convention.value, convention.source)
    return table


def tensor_table(report: HeadReport) -> Table:
    table = Table(title=f"tensors of {report.path}", title_justify="left")
    for name, justify in (("tensor", "left"), ("shape", "right"), ("type", "left"), ("MB", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for tensor in report.tensors:
        shape = " × ".join(map(str, tensor.shape))
        table.add_row(tensor.name, shape, tensor.dtype, f"{tensor.bytes / 1e6:.2f}")
    return table


def fact_table(report: HeadReport) -> Table:
    table = Table(show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts(report).items():
        table.add_row(name, value)
    return table


def facts(report: HeadReport) -> dict[str, str]:
    """What the table says, by row."""
    from tercel.interop.card import held_out_basis

    config, cost = report.config, report.cost
    coverage = "" if report.coverage is None else f", {report.coverage:.2%} of the text it learned from"
    whose = report.training.target_name or "not recorded"
    target = report.target or {"name": whose, "weights": "-", "tokenizer": "-"}
    held_out = report.measured.held_out
    training = report.training
    rows = {
        "target": f"{target['name']} (weights {target['weights']}, tokenizer {target['tokenizer']})",
        "feature layers": report.reads,
        "kind": report.kind,
        "draft vocabulary": f"{config.draft_vocab_size:,} of {config.vocab_size:,} tokens{coverage}",
        "positions": f"{config.max_position_embeddings:,}",
        "parameters": f"{report.parameters:,}",
        "weights": f"{cost.weight_bytes / 1e6:.1f} MB",
        "a drafted token": f"{cost.drafted_macs / 1e6:.2f} M MACs = {cost.drafted_flops / 1e6:.2f} MFLOPs, "
        f"and {cost.context_macs:,} MACs for each token of context",
        "a committed token": f"{cost.fuse_macs / 1e6:.2f} M MACs for its features",
        "keys and values": f"{cost.kv_bytes:,} bytes a token, "
        f"{cost.kv_bytes * config.max_position_embeddings / 1e6:.1f} MB for all positions",
    }
    if training.data is not None:
        rows["data"] = ", ".join(training.data) or "not recorded"
    if training.conversations is not None:
        rows["learned from"] = (
            f"{training.conversations:,} conversations, {training.tokens:,} tokens, "
            f"{training.supervised_tokens:,} of them the assistant's"
        )
    if training.recipe is not None:
        rows["recipe"] = ", ".join(f"{k}={v}" for k, v in training.recipe.to_json().items())
    if held_out is not None:
        rows["held-out τ"] = f"{held_out.tau:.3f} ({held_out_basis(held_out)})"
        rows["n-α"] = " ".join(f"{value:.3f}" for value in held_out.alpha)
    return rows
