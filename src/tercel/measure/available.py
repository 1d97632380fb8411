"""Which methods can run here, and what the others lack: asked before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping

from tercel.decode.proposers import EAGLE3, KINDS, LOOKAHEAD, PLD, SPS, SUFFIX, VANILLA, proposer_kind
from tercel.measure.manifest import Entry

TRANSFORMERS = "transformers"  # stock `generate()`, which is no proposer
# what `--methods all` stands for, the paper's methods in its order among them
EVERY = (
    VANILLA,
    TRANSFORMERS,
    SPS,
    PLD,
    SUFFIX,
    LOOKAHEAD,
    "medusa",
    "hydra",
    "eagle",
    "eagle2",
    "hass",
    EAGLE3,
    "mtp",
)
# methods that draft with the head of another, where a manifest names none for them
SHARES = {"eagle2": "eagle", "eagle": "eagle2", "medusa-typical": "medusa"}


def entry_of(name: str, manifest: Mapping[str, Entry], head: str | None = None) -> Entry:
    """What the name stands for: a manifest's entry, that of a method with the same head, or the method with `head`."""
    if name in manifest:
        return manifest[name]
    shared = manifest.get(SHARES.get(name, ""))
    return Entry(name, head if shared is None else shared.head)


def lacking(entry: Entry, *, has_head: bool, has_model: bool) -> str | None:
    """Why the method cannot run, as a clause; None if it can. has_head: whether a head for EAGLE-3 is given or shipped,
    which is what stands for a head that an entry leaves out."""
    if entry.method not in KINDS and ":" not in entry.method:
        return "this version has no such method"
    kind = proposer_kind(entry.method)
    needs = kind.needs
    if "head" in kind.may and entry.head is None:
        return f"whether the target brings its own is seen where it is asked for: name {entry.method} in --methods"
    if "head" in needs and entry.head is None and not (has_head and entry.method.startswith(EAGLE3)):
        return "no head is given"
    if "model" in needs and not has_model:
        return "no --draft-model is given"
    return None
