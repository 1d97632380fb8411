"""Weights of a folder as tensors: safetensors or a pickle, whole or in shards; nothing in them is ever executed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from tercel.draft.load import read_tensors
from tercel.errors import TercelError
from tercel.interop.formats.pickles import read_pickle
from tercel.reading import check_readable, read_shards

SAFE, PICKLED = "model.safetensors", "pytorch_model.bin"
# parts of names that PyTorch adds for modules which were compiled, or trained in parallel
_WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


@dataclass(frozen=True)
class Weights:
    """Tensors by the names they are stored under, without what wrappers add; `file` is what to name in a sentence
    about them."""

    tensors: Mapping[str, Tensor]
    file: Path


def read_weights(folder: Path) -> Weights:
    """All tensors of the folder, mapped from disk where the file allows it.

    Looks for `model.safetensors`, its index of shards, any single safetensors file, `pytorch_model.bin` and its
    index, in this order. Raises `TercelError` if there is none, a shard is missing, a file is damaged, or a pickle
    holds anything but tensors.
    """
    check_readable(folder)
    for name in (SAFE, PICKLED):
        if (folder / name).is_file():
            return Weights(_read(folder / name), folder / name)
        index = folder / f"{name}.index.json"
        if index.is_file():
            return Weights(_read_shards(index), index)
        if name == SAFE and len(others := sorted(folder.glob("*.safetensors"))) == 1:
            return Weights(_read(others[0]), others[0])
    raise TercelError(f"{folder} has neither {SAFE} nor {PICKLED}; is it a head, and was it saved completely?")


def _read(file: Path) -> dict[str, Tensor]:
    stored = read_tensors(file) if file.suffix == ".safetensors" else read_pickle(file)
    tensors: dict[str, Tensor] = {}
    for raw, tensor in stored.items():
        name = _unwrapped(raw)
        if name in tensors:
            raise TercelError(f"{file} holds {name} twice, once as {raw}; remove one")
        tensors[name] = tensor
    return tensors


def _read_shards(index: Path) -> dict[str, Tensor]:
    places = read_shards(index)
    tensors: dict[str, Tensor] = {}
    for shard in sorted(set(places.values())):
        stored = _read(index.parent / shard)
        for raw in (name for name, place in places.items() if place == shard):
            name = _unwrapped(raw)
            if name not in stored:
                raise TercelError(f"{index} says {raw} is in {shard}, but it is not; fetch the head again")
            tensors[name] = stored[name]
    return tensors


def _unwrapped(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
