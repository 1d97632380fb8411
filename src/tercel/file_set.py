"""Files of a folder that belong together and are replaced together, without touching anything else that lies there.

A new set is first written whole to a hidden sub-folder. Then the manifest, which holds the checksum of every file of
the set, is replaced: from that moment the new set counts. At last each file is renamed into its place. Whoever writes
to the folder next finishes what a kill or a power cut left undone, or sweeps it away if the manifest had not changed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tercel.errors import TercelError
from tercel.files import UNWRITTEN, refuse_unwritable, sha256_file, sync, take_over, unwritten, write_json
from tercel.locks import OURS
from tercel.reading import check_utf8, read_json

MANIFEST = f"{OURS}files.json"
STAGING = f"{OURS}new"
FORMAT = 1
CONFIG, WEIGHTS, RECORD, CARD = "config.json", "model.safetensors", "tercel.json", "README.md"
HEAD_FILES = (CONFIG, WEIGHTS, RECORD)


@dataclass(frozen=True)
class Manifest:
    """kind: what the set is ("head", "export", "training state"); files: sha256 by name; gone: of the files of the
    set before that this one has no more; shared: names of files that hold somebody else's words as well.
    """

    kind: str
    files: Mapping[str, str]
    gone: Mapping[str, str] = field(default_factory=dict)
    shared: Sequence[str] = ()


def read_manifest(folder: Path) -> Manifest | None:
    """What the folder's set is; None where there is none, or its manifest is damaged."""
    try:
        value = read_json(folder / MANIFEST)
        manifest = Manifest(value["kind"], dict(value["files"]), dict(value["gone"]), list(value["shared"]))
        names = [*manifest.files, *manifest.gone, *manifest.shared]
        plain = all(name and Path(name).name == name and not name.startswith(".") for name in names)
    except (TercelError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return manifest if plain and isinstance(manifest.kind, str) else None


@contextmanager
def file_set(folder: Path, kind: str | None = None, shared: Sequence[str] = ()) -> Iterator[Path]:
    """Yield an empty folder for the files of a new set; they take their places when the block ends without an error.

    kind: what the set is; its files replace those of a set of the same kind. None: only the files written change.
    shared: names of files that may be replaced although somebody else wrote or edited them.
    Raises `TercelError` if a name is taken by a file that this package did not write, `folder` holds a set of another
    kind, or it cannot be written; then everything is as it was.
    """
    real = Path(os.path.realpath(folder))
    if kind is not None:  # weights are among them
        check_utf8(real)
    if real.is_file():
        raise TercelError(f"{folder} is a file; choose another folder")
    made = not os.path.exists(real)
    staging = real / STAGING
    try:
        real.mkdir(parents=True, exist_ok=True)
        settle(real)
        staging.mkdir()
        yield staging
        manifest = _prepare(real, folder, kind, shared)
        write_json(real / MANIFEST, {"format": FORMAT, **asdict(manifest)}, held=True)
    except BaseException as error:
        with suppress(OSError):
            settle(real)  # sweeps, unless the manifest was just replaced
            if made:
                real.rmdir()
        if isinstance(error, UNWRITTEN):
            raise TercelError(unwritten(folder, error)) from error
        raise
    try:
        _place(real, manifest, manifest.files)
    except OSError as error:
        reason = error.strerror or error
        raise TercelError(
            f"replacing the files of {folder} failed halfway: {reason}; the same command again finishes it"
        ) from error


def _prepare(real: Path, folder: Path, kind: str | None, shared: Sequence[str]) -> Manifest:
    """The manifest of what lies in the staging folder, which is on the disk by then."""
    staging, old = real / STAGING, read_manifest(real) or Manifest(kind or "head", {})
    staged = {file.name: sha256_file(file) for file in sorted(staging.iterdir())}
    if kind is not None and old.kind != kind:
        raise TercelError(f"{folder} holds other output of tercel ({old.kind}); choose another folder")
    refuse_foreign(folder, [name for name in staged if name not in shared])
    for name in staged:
        take_over(staging / name, real / name)
        sync(staging / name)
    sync(staging)
    sync(real)
    if kind is None:
        return Manifest(old.kind, {**old.files, **staged}, shared=sorted({*old.shared, *shared}))
    gone = {name: digest for name, digest in old.files.items() if name not in staged and name not in old.shared}
    return Manifest(kind, staged, gone)


def interrupted(folder: Path) -> bool:
    """Whether a replacement of the folder's files was begun and not ended."""
    return (folder / STAGING).is_dir()


def settle(folder: Path) -> None:
    """Finish or sweep away what an interrupted replacement left. Only for whoever may write to the folder now."""
    staging = folder / STAGING
    if not interrupted(folder):
        return
    manifest = read_manifest(folder)
    if manifest is None:
        shutil.rmtree(staging)
        return
    whole = [name for name, digest in manifest.files.items() if _is(staging / name, digest)]
    _place(folder, manifest, whole)


def _place(folder: Path, manifest: Manifest, ready: Iterable[str]) -> None:
    """Rename the staged files that are `ready`, and remove those of the set before that have no successor."""
    staging = folder / STAGING
    ready = [name for name in ready if (staging / name).is_file()]
    if CONFIG in ready and _differs(folder / CONFIG, staging / CONFIG):
        # weights of one head beside the description of another would load and be wrong: rather none for a moment
        for name in (RECORD, CONFIG):
            if name in ready or name in manifest.gone:
                (folder / name).unlink(missing_ok=True)
    for name, digest in manifest.gone.items():
        if _is(folder / name, digest):
            (folder / name).unlink()
    for name in sorted(ready, key=lambda name: name == CONFIG):  # every loader opens the config first
        os.replace(staging / name, folder / name)
    sync(folder)
    shutil.rmtree(staging)


def _is(file: Path, digest: str | None) -> bool:
    return file.is_file() and sha256_file(file) == digest


def _differs(old: Path, new: Path) -> bool:
    return old.is_file() and old.read_bytes() != new.read_bytes()


def refuse_foreign(folder: Path, names: Iterable[str]) -> None:
    """Raises `TercelError` if one of `names` in the folder is not from a set of its own, or is read-only."""
    manifest = read_manifest(folder)
    own = set(manifest.files) if manifest is not None else _of_a_head_without_manifest(folder)
    for name in names:
        if not os.path.lexists(folder / name):
            continue
        if name not in own:
            raise TercelError(
                f"{folder} holds a {name} that tercel did not write there; move it away or choose another folder"
            )
        refuse_unwritable(folder / name, folder / name)


def _of_a_head_without_manifest(folder: Path) -> set[str]:
    """The files of a head that an earlier version wrote, or that came here without its hidden file."""
    try:
        value = read_json(folder / RECORD)
    except TercelError:
        return set()
    return set(HEAD_FILES) if {"format", "head"} <= value.keys() else set()


def may_replace_card(folder: Path) -> bool:
    """Whether README.md is missing, or just as it was written: one that somebody edited is theirs."""
    file, manifest = folder / CARD, read_manifest(folder)
    if not os.path.lexists(file):
        return True
    return manifest is not None and CARD not in manifest.shared and _is(file, manifest.files.get(CARD))


def damaged(folder: Path) -> list[str]:
    """The files of the folder's set that are missing or not as they were written, the card aside."""
    manifest = read_manifest(folder)
    if manifest is None:
        return [MANIFEST]
    return [name for name, digest in manifest.files.items() if name != CARD and not _is(folder / name, digest)]


def read_set(folder: Path) -> dict[str, bytes]:
    """The files of the folder's set by name; {} where there is none."""
    manifest = read_manifest(folder)
    return {name: (folder / name).read_bytes() for name in manifest.files} if manifest is not None else {}


def remove_set(folder: Path) -> None:
    """Remove the files of the folder's set, but a card that was edited."""
    settle(folder)
    manifest = read_manifest(folder)
    if manifest is None:
        return
    for name in manifest.files:
        if name != CARD or may_replace_card(folder):
            (folder / name).unlink(missing_ok=True)
    (folder / MANIFEST).unlink()
