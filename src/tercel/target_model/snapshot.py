"""Files of a model on the Hub, fetched into its client's cache and looked at there before anything loads them.

All of a model is read at one commit: between a look and the loading the repository may change.
"""

from __future__ import annotations

import glob
from collections.abc import Iterable, Sequence
from pathlib import Path

from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from transformers import PretrainedConfig

from tercel.errors import TercelError
from tercel.reading import read_json, read_shards

WEIGHTS, SHARDS = "model.safetensors", "model.safetensors.index.json"


def fetch_files(repository: str, revision: str | None, names: Iterable[str]) -> Path:
    """The folder of one commit in the cache, named after it, with those of the files that the repository has.

    Raises what the Hub's client raises (`why_unreadable`).
    """
    patterns = [glob.escape(name) for name in names]
    return Path(snapshot_download(repository, revision=revision, allow_patterns=patterns))


def cached_folder(repository: str, revision: str | None) -> Path | None:
    """The folder of what was fetched of a repository before, be it all or not; None if nothing was."""
    try:
        return Path(snapshot_download(repository, revision=revision, local_files_only=True))
    except LocalEntryNotFoundError:
        return None


def fetch_weights(repository: str, revision: str | None, config: PretrainedConfig) -> Path:
    """As `fetch_files`, with all safetensors that loading will read.

    Raises also `TercelError` if there are none, or an index names files that it must not.
    """
    named = config.to_dict().get("transformers_weights")
    first = _first_of(repository, revision, (WEIGHTS, SHARDS) if named is None else (str(named),))
    if first.name.endswith(".index.json"):
        places = read_json(first, "fetch it again").get("weight_map")
        shards = {place for place in places.values() if isinstance(place, str)} if isinstance(places, dict) else ()
        fetch_files(repository, first.parent.name, shards)
        read_shards(first)
    return first.parent


def _first_of(repository: str, revision: str | None, names: Sequence[str]) -> Path:
    """The first of the files that is there."""
    unreachable: LocalEntryNotFoundError | None = None
    for name in names:
        try:
            return Path(hf_hub_download(repository, name, revision=revision))
        except LocalEntryNotFoundError as error:
            unreachable = error
        except EntryNotFoundError:
            continue
    if unreachable is not None:
        raise unreachable
    raise TercelError(
        f"{repository} has no {names[0]} (pickled weights are never read); choose a repository with safetensors"
    )
