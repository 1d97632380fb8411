"""`tercel inspect`: what a head is, costs, and comes from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from tercel.cli.consoles import result_console
from tercel.cli.options import JsonFile
from tercel.files import write_json
from tercel.heads import resolve_head

if TYPE_CHECKING:
    from tercel.draft.inspect import HeadReport


def command(
    head: Annotated[str, typer.Argument(metavar="HEAD", help="A head's folder, or a target with a shipped head.")],
    json_file: JsonFile = None,
) -> None:
    """Explain a draft head: shapes, cost, target, training and measured numbers."""
    from tercel.draft.inspect import inspect_head

    report = inspect_head(resolve_head(head, head))
    console = result_console()
    console.print(tensor_table(report))
    console.print(fact_table(report))
    for warning in report.warnings:
        console.print(Text(f"warning: {warning}", style="yellow"), soft_wrap=True)
    if json_file is not None:
        write_json(json_file, report.to_json())


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
        table.add_row(name, Text(value))
    return table


def facts(report: HeadReport) -> dict[str, str]:
    """What the table says, by row."""
    config, cost = report.config, report.cost
    layers = ", ".join(map(str, config.feature_layers))
    coverage = "" if report.coverage is None else f", {report.coverage:.2%} of the text it learned from"
    target = report.target or {"name": "not recorded", "weights": "-", "tokenizer": "-"}
    held_out = report.measured.get("held_out")
    training = report.training
    rows = {
        "target": f"{target['name']} (weights {target['weights']}, tokenizer {target['tokenizer']})",
        "feature layers": f"inputs of layers {layers} of {config.target_num_layers}",
        "kind": _kind(report),
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
    if "data" in training:
        rows["data"] = ", ".join(training["data"]) or "not recorded"
    if {"conversations", "tokens", "supervised_tokens"} <= training.keys():
        rows["learned from"] = (
            f"{training['conversations']:,} rows, {training['tokens']:,} tokens, "
            f"{training['supervised_tokens']:,} of them the assistant's"
        )
    if "recipe" in training:
        rows["recipe"] = ", ".join(f"{k}={v}" for k, v in training["recipe"].items())
    if held_out:
        rows["held-out τ"] = f"{held_out['tau']:.3f} over {held_out['rows']:,} rows"
        rows["n-α"] = " ".join(f"{value:.3f}" for value in held_out["alpha"])
    return rows


def _kind(report: HeadReport) -> str:
    newer = [
        name for name, on in (("fc_norm", report.config.fc_norm), ("norm_output", report.config.norm_output)) if on
    ]
    return f"EAGLE-3.1 ({', '.join(newer)})" if newer else "EAGLE-3"
