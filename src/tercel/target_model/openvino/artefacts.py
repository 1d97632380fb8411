"""Converted graphs in the package's cache: each is made once, and is there whole or not at all."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import openvino as ov
import transformers

from tercel.files import atomic_dir, cache_dir
from tercel.locks import made_once
from tercel.target_model.backend_names import OPENVINO
from tercel.target_model.openvino.runtime import core

VERSION = 3  # raise it when a graph of the same target comes out differently
_FILE = "graph.xml"


def graph_folder(*key: object) -> Path:
    """Where in the cache the graph of this key is, or will be."""
    text = "|".join(str(part) for part in (VERSION, ov.get_version(), transformers.__version__, *key))
    return cache_dir() / OPENVINO / hashlib.sha256(text.encode()).hexdigest()[:24]


def kept_graph(folder: Path, convert: Callable[[], ov.Model]) -> ov.Model:
    """The graph in `folder`, converted and put there if it is missing.

    Raises `TercelError` if it cannot be written, and what `convert` raises.
    """
    if not folder.exists():
        with made_once(folder):
            if not folder.exists():
                model = convert()
                with atomic_dir(folder) as partial:
                    ov.save_model(model, partial / _FILE, compress_to_fp16=False)
    return core().read_model(folder / _FILE)
