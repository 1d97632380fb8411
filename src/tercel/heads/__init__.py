"""Draft heads by name: the ones that come with the package, one folder for each target that has one, and the Hub's."""

from __future__ import annotations

import os
from pathlib import Path

from tercel.errors import TercelError

# What a head consists of, in every format that is read; nothing else of a repository is fetched.
FILES = ("*.json", "*.safetensors", "pytorch_model*.bin", "README.md")


def available() -> tuple[str, ...]:
    """The targets that have a shipped head, by the names `tercel` knows them under."""
    return tuple(sorted(file.parent.name for file in Path(__file__).parent.glob("*/tercel.json")))


def shipped(alias: str) -> Path | None:
    """The folder of the head shipped for the target `alias`, or None if there is none."""
    name = alias.lower()
    return Path(__file__).parent / name if name in available() else None


def known_as(folder: Path | None) -> str:
    """What the head in `folder` is called beside its numbers: a shipped one by its name, others by their place."""
    if folder is None:
        return "head"
    return folder.name if folder.parent == Path(__file__).parent else str(folder)


def resolve_head(name: str | None, target_name: str) -> Path:
    """The folder of the head that is meant: one on disk, a shipped one, (None) the target's shipped one, or one of
    the Hub (`owner/name`, `owner/name@revision`), which is fetched.

    Raises `TercelError` if there is no such head, or it cannot be fetched.
    """
    wanted = target_name if name is None else name
    if name is not None and (given := Path(os.path.expanduser(name))).is_dir():
        return given
    if (folder := shipped(wanted)) is not None:
        return folder
    if name is None:
        raise TercelError(
            f"no head is shipped for {target_name}; give HEAD, the folder that `tercel train` made for it"
        )
    if _of_hub(name):
        return fetch_head(name)
    raise TercelError(f"there is no head {name}; {_hint()}")


def may_be(name: str) -> bool:
    """Whether there is such a head on disk or shipped, or it may be one of the Hub, which is not asked."""
    return Path(os.path.expanduser(name)).is_dir() or shipped(name) is not None or _of_hub(name)


def _of_hub(name: str) -> bool:
    return "/" in name and not name.startswith(("/", "~", "."))


def fetch_head(name: str) -> Path:
    """The local copy of a head on the Hub, downloaded on first use; only the files of a head, and no code.

    Raises `TercelError` if there is no such repository, or it cannot be reached.
    """
    from huggingface_hub import snapshot_download

    from tercel.hub import HubName, why_unreadable

    on_hub = HubName.parse(name)
    if on_hub is None:
        raise TercelError(f"there is no folder {name}, and it cannot be a name on the Hub; {_hint()}")
    try:
        return Path(snapshot_download(on_hub.id, revision=on_hub.revision, allow_patterns=list(FILES)))
    except Exception as error:  # the client raises several unrelated types
        reason = why_unreadable(
            error, name, on_hub.revision, "head", otherwise=_hint(), offline="or give a folder that holds the head"
        )
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise TercelError(reason or f"cannot fetch the head {name} ({line}); {_hint()}") from error


def _hint() -> str:
    names = available()
    known = f", or the name of a target with a shipped head ({', '.join(names)})" if names else ""
    return f"give a head's folder, owner/name on the Hub{known}"
