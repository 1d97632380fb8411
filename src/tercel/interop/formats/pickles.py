"""Pickles of `torch.save`: nothing but tensors is made of them, and no more than their file holds."""

from __future__ import annotations

import pickle
import pickletools
import re
import warnings
import zipfile
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from tercel.draft.load import check_plain
from tercel.errors import TercelError

# what pickles of tensors name; everything else could run code, or ask for memory
_KNOWN = re.compile(
    r"collections OrderedDict"
    r"|torch\._utils _rebuild_(tensor|tensor_v2|parameter|sparse_tensor|qtensor)"
    r"|torch\._tensor _rebuild_from_type_v2|torch\.serialization _get_layout"
    r"|torch(\.storage)? \w+Storage|torch\.nn\.parameter Parameter"
    r"|torch (Tensor|Size|device|bool|half|double|long|short|(b?float|q?u?int|complex)\w*)"
)
_ENTRIES = ("state_dict", "model_state_dict")  # where trainers put the weights beside other things
_OLD_PARTS = 5  # pickles at the start of a file in the format before zip: magic, version, system, values, storages


def read_pickle(file: Path) -> dict[str, Tensor]:
    """The state dict in a pickle, also where it is an entry `state_dict` or `model_state_dict` beside other things.

    Raises `TercelError` for what could run code, is damaged, holds no state dict, or asks for more than it holds.
    """
    try:
        zipped = zipfile.is_zipfile(file)
        _check_names(file, zipped)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's remarks on pickle protocols, of which no user can make use
            # only the zip format can be mapped; the older one is read whole
            values = torch.load(file, map_location="cpu", weights_only=True, mmap=zipped)
    except pickle.UnpicklingError as error:
        raise TercelError(
            f"{file} is damaged, or its pickle holds more than tensors and could run code, so it was not read; "
            "get the head as model.safetensors"
        ) from error
    except TercelError:
        raise
    except Exception as error:  # a damaged pickle can do anything but run code
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise TercelError(f"{file} is truncated or not a PyTorch file ({reason}); save or fetch it again") from error
    tensors = _state_dict(values, file)
    _check_sizes(tensors, file)
    return check_plain(tensors, file)


def _check_names(file: Path, zipped: bool) -> None:
    """Refuse a pickle that names anything but what tensors are made of, and a zip file that is packed: torch stores."""
    if not zipped:
        with file.open("rb") as stream:
            for _ in range(_OLD_PARTS):
                _check_pickle(stream)
        return
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        packed = next((entry for entry in entries if entry.compress_type != zipfile.ZIP_STORED), None)
        if packed is not None or sum(entry.file_size for entry in entries) > file.stat().st_size:
            raise TercelError(f"{file} is packed, which torch.save does not do; save its state_dict() again")
        for entry in entries:
            if entry.filename.rsplit("/", 1)[-1] == "data.pkl":
                with archive.open(entry) as stream:
                    _check_pickle(stream)


def _check_pickle(stream: IO[bytes]) -> None:
    for operation, argument, _ in pickletools.genops(stream):
        if operation.name == "STACK_GLOBAL" or (operation.name == "GLOBAL" and not _KNOWN.fullmatch(str(argument))):
            raise pickle.UnpicklingError(str(argument))


def _state_dict(values: Any, file: Path) -> dict[str, Tensor]:
    if isinstance(values, dict):
        inner = next((values[name] for name in _ENTRIES if isinstance(values.get(name), dict)), None)
        values = values if inner is None else inner
    if not isinstance(values, dict):
        raise TercelError(
            f"{file} holds a {type(values).__name__}, but a head's file maps names to tensors; save its state_dict()"
        )
    for name, value in values.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            what = repr(name[:80]) if isinstance(name, str) else f"under a {type(name).__name__}"
            raise TercelError(
                f"{file} holds an entry {what} that is not a tensor, but a head's file maps names to tensors; save its "
                "state_dict()"
            )
    return dict(values)


def _check_sizes(tensors: dict[str, Tensor], file: Path) -> None:
    """A tensor may claim any shape over a storage of one number; computing with it would fill the memory."""
    room = file.stat().st_size
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided or tensor.device.type != "cpu":
            continue  # refused by `check_plain`
        wanted = tensor.numel() * tensor.element_size()
        if wanted > tensor.untyped_storage().nbytes() or (room := room - wanted) < 0:
            raise TercelError(
                f"{name} in {file} claims {list(tensor.shape)}, which is more than the file holds; save it contiguous"
            )
