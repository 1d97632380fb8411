"""`tercel methods`: by what drafts can be made, and what each needs."""

from __future__ import annotations

from rich.table import Table

from tercel.cli.bench import TRANSFORMERS
from tercel.cli.consoles import result_console
from tercel.cli.options import JsonFile
from tercel.decode.proposers import KINDS, proposer_kind
from tercel.files import write_json

_NEEDS = {"head": "HEAD", "model": "--draft-model"}


def command(json_file: JsonFile = None) -> None:
    """List the methods for --draft and `bench --methods`, and what each needs beside the target.

    One of your own is named MODULE:ATTRIBUTE (docs/proposers.md).
    """
    kinds = [(name, proposer_kind(name)) for name in KINDS]
    rows = [(name, kind.about, [_NEEDS[need] for need in kind.needs], kind.lossy) for name, kind in kinds]
    rows.append((TRANSFORMERS, "no drafts: stock generate(), in bench only", [], False))
    if json_file is not None:
        told = [{"name": name, "drafts": about, "needs": needs, "lossy": lossy} for name, about, needs, lossy in rows]
        write_json(json_file, {"methods": told})
    table = Table("method", "what drafts", "needs")
    for name, about, needs, _ in rows:
        table.add_row(name, about, ", ".join(needs))
    result_console(json_file).print(table)
