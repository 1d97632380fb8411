"""Weights of a folder as tensors: safetensors or a pickle, whole or in shards; nothing in them is ever executed."""

from __future__ import annotations

import pickle
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tercel.draft.checkpoint import read_json, read_tensors
from tercel.errors import TercelError

SAFE, PICKLED = "model.safetensors", "pytorch_model.bin"


@dataclass(frozen=True)
class Weights:
    """Tensors by the names they are stored under; `file` is what to name in a sentence about them."""

    tensors: Mapping[str, Tensor]
    file: Path


def read_weights(folder: Path) -> Weights:
    """All tensors of the folder, mapped from disk where the file allows it.

    Looks for `model.safetensors`, its index of shards, any single safetensors file, `pytorch_model.bin` and its
    index, in this order. Raises `TercelError` if there is none, a shard is missing, a file is damaged, or a pickle
    holds anything but tensors.
    """
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
    tensors = read_tensors(file) if file.suffix == ".safetensors" else _read_pickle(file)
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise TercelError(f"{name} in {file} is a sparse or quantised tensor; give the head with plain weights")
    return tensors


def _read_shards(index: Path) -> dict[str, Tensor]:
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(place, str) for place in places.values()):
        raise TercelError(f"{index} has no weight_map from tensors to files; save or fetch the head again")
    tensors: dict[str, Tensor] = {}
    for shard in sorted(set(places.values())):
        if Path(shard).name != shard:
            raise TercelError(f"{index} names the file {shard!r} outside of its folder; do not trust this head")
        if not (index.parent / shard).is_file():
            raise TercelError(f"{index} names {shard}, which is missing; fetch the head again")
        stored = _read(index.parent / shard)
        for name in (name for name, place in places.items() if place == shard):
            if name not in stored:
                raise TercelError(f"{index} says {name} is in {shard}, but it is not; fetch the head again")
            tensors[name] = stored[name]
    return tensors


def _read_pickle(file: Path) -> dict[str, Tensor]:
    """A state dict written by `torch.save`, read with `weights_only`: no class but tensors is made."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's remarks on pickle protocols, of which no user can make use
            # only the zip format can be mapped; the older one is read whole
            values = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except pickle.UnpicklingError as error:
        raise TercelError(
            f"{file} is damaged, or its pickle holds more than tensors and could run code, so it was not read; "
            f"get the head as {SAFE}"
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, IndexError, AttributeError, TypeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise TercelError(f"{file} is truncated or no PyTorch file ({reason}); save or fetch it again") from error
    wrong = None
    if isinstance(values, dict):
        wrong = next((str(k) for k, v in values.items() if not (isinstance(k, str) and isinstance(v, Tensor))), None)
    if not isinstance(values, dict) or wrong is not None:
        what = f"an entry {wrong!r} that is no tensor" if wrong is not None else f"a {type(values).__name__}"
        raise TercelError(f"{file} holds {what}, but a head's file maps names to tensors; save its state_dict()")
    return values
