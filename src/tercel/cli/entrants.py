"""Which methods a verb compares, of what heads: as `--methods`, `--heads` and HEAD ask for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tercel.cli.consoles import say
from tercel.cli.models import open_head, ready_proposer
from tercel.cli.options import DraftOptions
from tercel.decode.proposers import VANILLA, check_known, proposer_kind
from tercel.errors import TercelError
from tercel.heads import shipped
from tercel.measure.available import EVERY, TRANSFORMERS, brings_modules, entry_of, lacking
from tercel.measure.manifest import Entry, read_manifest

if TYPE_CHECKING:
    from tercel.decode.proposer import Proposer
    from tercel.draft import DraftModel
    from tercel.measure.entrants import Heads
    from tercel.target_model.model import Target

ALL = "all"


def names_asked(
    text: str, target: str, head: str | None, options: DraftOptions, heads: Path | None = None
) -> tuple[tuple[str, ...], dict[str, Entry]]:
    """What `--methods` names, in order, and what drafts by each of them. heads: the file of `--heads`.

    Raises `TercelError` for an unknown name, without vanilla, and for a file of heads that cannot be read.
    """
    manifest = {} if heads is None else read_manifest(heads)
    for name, entry in manifest.items():
        DraftOptions(draft=entry.method, tree=entry.tree or options.tree)  # says what is wrong with them
        if name == TRANSFORMERS:
            raise TercelError(f"{heads}: {name} is stock generation, which drafts with nothing; leave it out")
    if text == ALL:
        return every_method(target, head, options, manifest)
    names = parse_methods(text, tuple(manifest))
    return names, entries_of(names, manifest, head)


def every_method(
    target: str, head: str | None, options: DraftOptions, manifest: Mapping[str, Entry]
) -> tuple[tuple[str, ...], dict[str, Entry]]:
    """All that has what it needs; says what is left out for want of it. HEAD drafts for the methods that it is of.

    Raises `TercelError` if there is no such head, or its files cannot be read.
    """
    own, has_model = brings_modules(target), options.draft_model is not None
    has_shipped, served = shipped(target) is not None, () if head is None else _methods_of(head, target)
    names, entries = list[str](), dict[str, Entry]()
    for name in dict.fromkeys((*EVERY, *manifest)):
        if name == TRANSFORMERS:
            names.append(name)
            continue
        entry = entry_of(name, manifest, head if name in served else None)
        lacks = lacking(entry, has_head=has_shipped, has_model=has_model, has_modules=own)
        if lacks is None:
            names.append(name)
            entries[name] = entry
        else:
            say(f"note: {name} is left out: {lacks}")
    return tuple(names), entries


def _methods_of(head: str, target: str) -> tuple[str, ...]:
    from tercel.heads import resolve_head
    from tercel.interop.formats.read import methods_of_folder

    return methods_of_folder(resolve_head(head, target))


def parse_methods(text: str, also: Sequence[str] = ()) -> tuple[str, ...]:
    """`"vanilla,eagle3"` to its names; also: names of a file of heads. Raises `TercelError` for an unknown one, and
    without vanilla."""
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    for name in names:
        if name not in also:
            check_known(name, (TRANSFORMERS, *also))
            if name != TRANSFORMERS:
                proposer_kind(name)
    if VANILLA not in names:
        raise TercelError(f"--methods {text!r} lacks vanilla, which the others are compared with; add it")
    return names


def entries_of(names: Sequence[str], manifest: Mapping[str, Entry], head: str | None) -> dict[str, Entry]:
    """What drafts by each name; stock generation has none."""
    return {name: entry_of(name, manifest, head) for name in names if name != TRANSFORMERS}


def open_heads(target: Target, options: DraftOptions) -> Heads:
    """Heads for this target, each checked when it is first asked for."""
    from tercel.measure.entrants import Heads

    return Heads(lambda name: open_head(name, target, options))


def make_entry(
    options: DraftOptions, entry: Entry, target: Target, head: DraftModel | None, model: Target | None
) -> Proposer:
    """As large as the entry says, or else the options."""
    return ready_proposer(
        entry.method, target, head, replace(options, tree=entry.tree or options.tree), model=model
    )
