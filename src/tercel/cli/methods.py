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
    rows = []
    for name in KINDS:
        kind = proposer_kind(name)
        rows.append({"name": name, "drafts": kind.about, "needs": [_NEEDS[need] for need in kind.needs]})
    rows.append({"name": TRANSFORMERS, "drafts": "no drafts: stock generate(), in bench only", "needs": []})
    if json_file is not None:
        write_json(json_file, {"methods": rows})
    table = Table("method", "what drafts", "needs")
    for row in rows:
        table.add_row(row["name"], row["drafts"], ", ".join(row["needs"]))
    result_console(json_file).print(table)
