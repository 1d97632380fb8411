"""`tercel methods`: by what drafts can be made, what each needs, and which of it is there."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from tercel.cli.consoles import result_console
from tercel.cli.options import HeadsFile, JsonFile
from tercel.cli.paths import user_name
from tercel.decode.proposers import KINDS, proposer_kind
from tercel.files import write_json
from tercel.heads import may_be, shipped
from tercel.measure.available import EVERY, TRANSFORMERS, brings_modules, entry_of, lacking
from tercel.measure.manifest import Entry, read_manifest

_NEEDS = {"head": "HEAD", "model": "--draft-model"}
_ABSENT = "not in this version"


def command(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[TARGET]", parser=user_name, help="Tell what is there for this target.", show_default=False
        ),
    ] = None,
    heads: HeadsFile = None,
    json_file: JsonFile = None,
) -> None:
    """List the methods for --draft and `bench --methods`, and what each needs beside the target.

    One of your own is named MODULE:ATTRIBUTE (docs/proposers.md).
    """
    if target is not None and Path(target).exists():
        from tercel.target_model.stored import StoredTarget

        StoredTarget.find(target, ask_hub=False)  # what is no model is told
    manifest = {} if heads is None else read_manifest(heads)
    has_head = target is not None and shipped(target) is not None
    known = [name for name in dict.fromkeys((*KINDS, *manifest, *EVERY)) if name != TRANSFORMERS]
    has_modules = target is not None and brings_modules(target)
    rows = [_row(name, entry_of(name, manifest), has_head, has_modules) for name in known]
    rows.append((TRANSFORMERS, "no drafts: stock generate(), in bench only", [], False, "yes"))
    if json_file is not None:
        told = [dict(zip(("name", "drafts", "needs", "lossy", "ready"), row, strict=True)) for row in rows]
        write_json(json_file, {"methods": told})
    told_here = target is not None or heads is not None
    table = Table("method", "what drafts", "needs", *(["ready"] if told_here else []))
    for name, about, needs, _, ready in rows:
        table.add_row(name, about, ", ".join(needs), *([ready] if told_here else []))
    result_console(json_file).print(table)


def _row(name: str, entry: Entry, has_head: bool, has_modules: bool) -> tuple[str, str, list[str], bool, str]:
    """Name, what drafts, what it needs, whether it changes the text, and whether what it needs is there: yes, the
    head's folder, or what is missing."""
    if entry.method not in KINDS and ":" not in entry.method:
        return name, _ABSENT, [], False, "no: this version has no such method"
    kind = proposer_kind(entry.method)
    lacks = lacking(entry, has_head=has_head, has_model=False, has_modules=has_modules)
    if lacks is None and entry.head is not None and not may_be(entry.head):
        lacks = f"there is no head {entry.head}"
    ready = f"no: {lacks}" if lacks is not None else entry.head or "yes"
    return name, kind.about, [_NEEDS[need] for need in kind.needs], kind.lossy, ready
