"""Which methods can run here, and what the others lack: asked before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tercel.decode.proposers import (
    EAGLE,
    EAGLE2,
    EAGLE3,
    HASS,
    HYDRA,
    KINDS,
    LOOKAHEAD,
    MEDUSA,
    MEDUSA_TYPICAL,
    MTP,
    P_EAGLE,
    PLD,
    SPS,
    SUFFIX,
    VANILLA,
    proposer_kind,
)
from tercel.errors import TercelError
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
    MEDUSA,
    HYDRA,
    EAGLE,
    EAGLE2,
    HASS,
    EAGLE3,
    MTP,
    P_EAGLE,
)
# methods that draft with the head of another, where a manifest names none for them
SHARES = {EAGLE2: EAGLE, EAGLE: EAGLE2, MEDUSA_TYPICAL: MEDUSA}


def entry_of(name: str, manifest: Mapping[str, Entry], head: str | None = None) -> Entry:
    """What the name stands for: a manifest's entry, that of a method with the same head, or the method with `head`."""
    if name in manifest:
        return manifest[name]
    shared = manifest.get(SHARES.get(name, ""))
    return Entry(name, head if shared is None else shared.head)


def brings_modules(target: str) -> bool:
    """Whether MTP modules lie in the target's own files, as far as those are here. What is wrong with the files is said
    when they are loaded."""
    from tercel.methods.mtp.read import modules_of
    from tercel.target_model.stored import StoredTarget

    if not Path(target).is_dir() and "/" not in target:  # a name of the index, whose files hold none
        return False
    try:
        return modules_of(StoredTarget.find(target, ask_hub=False)) is not None
    except TercelError:
        return False


def lacking(entry: Entry, *, has_head: bool, has_model: bool, has_modules: bool = False) -> str | None:
    """Why the method cannot run, as a clause; None if it can. has_head: whether a head for EAGLE-3 is shipped,
    which is what stands for a head that an entry leaves out. has_modules: as `brings_modules`."""
    if entry.method not in KINDS and ":" not in entry.method:
        return "this version has no such method"
    kind = proposer_kind(entry.method)
    needs = kind.needs
    if "head" in kind.may and entry.head is None and not has_modules:
        return "the target's own files hold no module, and no head is given"
    if "head" in needs and entry.head is None and not (has_head and entry.method.startswith(EAGLE3)):
        return "no head is given"
    if "model" in needs and not has_model:
        return "no --draft-model is given"
    return None
