"""A head's folder as this package writes it, read back: sizes are compared with the file's own tensors first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tercel.draft.checkpoint import FORMAT, DraftModel, HeadInfo, TargetIdentity
from tercel.draft.config import HeadConfig
from tercel.draft.head import DraftHead
from tercel.draft.history import MeasuredRecord, TrainingRecord
from tercel.draft.kinds import config_of, head_class, new_head
from tercel.draft.vocabulary import MAPS, DraftVocabulary
from tercel.errors import TercelError
from tercel.reading import read_json

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_MAP_TYPES = (*_FLOATS, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def load_head(path: Path, *, dtype: torch.dtype = torch.float32, device: str = "cpu") -> DraftModel:
    """Read a checkpoint folder.

    Raises `TercelError` for a missing, truncated, pickled, incomplete, misshapen or NaN checkpoint.
    """
    if not path.is_dir():
        raise TercelError(f"there is no head at {path}: give a folder with config.json and model.safetensors")
    weights = path / "model.safetensors"
    if not weights.is_file():
        pickled = next(iter(sorted([*path.glob("*.bin"), *path.glob("*.pt")])), None)
        if pickled is not None:
            raise TercelError(
                f"{pickled} is a pickle, which can run code when it is read; convert it to model.safetensors first"
            )
        raise TercelError(f"{path} has no model.safetensors; is it a head, and was it saved completely?")
    if not (path / "tercel.json").is_file():
        raise TercelError(
            f"{path} has no tercel.json, so its feature layers and target are unknown; it was not made by tercel"
        )
    config, info = described(path / "tercel.json")
    tensors = read_tensors(weights)
    check_tensors(config, tensors, weights)
    vocabulary = read_vocabulary(tensors, config, path)
    return DraftModel(build_head(config, tensors, weights, dtype, device), vocabulary, info, path)


def described(path: Path) -> tuple[HeadConfig, HeadInfo]:
    """What `tercel.json` says."""
    extra = read_json(path)
    if extra.get("format") != FORMAT:
        raise TercelError(
            f"{path} has format {extra.get('format')!r}, but this version reads format {FORMAT}; update tercel"
        )
    for part in ("head", "training", "measured"):
        if not isinstance(extra.get(part), dict):
            raise TercelError(f"{path} has no object {part!r}; save or fetch the head again")
    try:
        config = config_of(extra["head"])
        identity = TargetIdentity(**extra["target"]) if extra["target"] else None
    except TercelError as error:
        raise TercelError(f"{path}: {error}") from error
    except (KeyError, TypeError) as error:
        raise TercelError(f"{path} is incomplete ({error}); save or fetch the head again") from error
    if identity is not None and not all(isinstance(value, str) for value in asdict(identity).values()):
        raise TercelError(f"{path} must tell the target by three texts; save or fetch the head again")
    training = TrainingRecord.from_json(extra["training"], "training", path)
    return config, HeadInfo(identity, training, MeasuredRecord.from_json(extra["measured"], "measured", path))


def build_head(
    config: HeadConfig, tensors: Mapping[str, Tensor], path: Path, dtype: torch.dtype, device: str
) -> DraftHead:
    """The frozen head of `config` with the weights of `tensors` (of the file `path`), which `check_tensors` passed."""
    with _building(path):
        head = new_head(config)
        usable = all(bool(torch.isfinite(buffer).all()) for buffer in head.buffers())
    if not usable:
        raise TercelError(f"{path.parent} describes a RoPE whose frequencies are not numbers; fetch the head again")
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            parameter.copy_(tensors[name])
    return head.to(device=device, dtype=dtype).eval().requires_grad_(False)


@contextmanager
def _building(path: Path) -> Iterator[None]:
    """RoPE takes parameters of many kinds and checks few of them, so that wrong ones fail anyhow."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise TercelError(f"{path.parent} describes a head that cannot be built ({reason})") from error


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file, as it stores them; raises `TercelError` if it is damaged, or as
    `check_plain`."""
    try:
        with safe_open(path, framework="pt") as stored:
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError, RuntimeError, LookupError, AttributeError, TypeError) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__  # the last four: types torch does not know
        raise TercelError(f"{path} is truncated or not safetensors ({reason}); save or fetch it again") from error
    return check_plain(tensors, path)


def check_plain(tensors: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    """`tensors` themselves. Raises `TercelError` for sparse and quantised ones, for a NaN and for an infinite number;
    `path` is where they came from."""
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
            raise TercelError(f"{name} in {path} is a sparse or quantised tensor; give the head with plain weights")
        is_map = name.rsplit(".", 1)[-1] in MAPS
        if tensor.dtype not in (_MAP_TYPES if is_map else _FLOATS):
            raise TercelError(
                f"{path} holds quantised weights ({name}, {str(tensor.dtype).removeprefix('torch.')}), which tercel "
                "does not read; give the head in bfloat16, float16 or float32"
            )
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise TercelError(f"{name} in {path} holds NaN or infinite numbers; the head is damaged, train it again")
    return tensors


def read_vocabulary(tensors: Mapping[str, Tensor], config: HeadConfig, path: Path) -> DraftVocabulary:
    """The draft vocabulary of `d2t`, or the whole one where nothing is pruned.

    Raises `TercelError` if a pruned head has no map, or its maps are damaged or contradict each other.
    """
    if "d2t" in tensors:
        try:
            vocabulary = DraftVocabulary.from_d2t(tensors["d2t"], config.vocab_size, config.draft_vocab_size)
        except TercelError as error:
            raise TercelError(f"{path}: {error}") from error
    elif config.draft_vocab_size == config.vocab_size:
        vocabulary = DraftVocabulary.full(config.vocab_size)
    else:
        raise TercelError(
            f"{path} drafts {config.draft_vocab_size} of {config.vocab_size} tokens but has no map d2t; "
            "without it every draft would be another token"
        )
    if "t2d" in tensors and not torch.equal(tensors["t2d"].bool(), vocabulary.t2d):
        raise TercelError(f"{path} holds maps d2t and t2d that contradict each other; save the head again")
    return vocabulary


def check_tensors(config: HeadConfig, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Compare names and shapes with what a head of `config` has; raises `TercelError` for the first difference."""
    with _building(path), torch.device("meta"):  # only the shapes: sizes may be damaged
        wanted = {name: parameter.shape for name, parameter in new_head(config).named_parameters()}
    missing = sorted(set(wanted) - set(tensors))
    if missing:
        raise TercelError(f"{path} lacks {missing[0]} ({len(missing)} tensors missing in all); the head is incomplete")
    unknown = sorted(set(tensors) - set(wanted) - set(MAPS))
    if unknown:
        title = head_class(config.kind).title
        raise TercelError(f"{path} holds {unknown[0]}, which no head of {title} has; is it another kind of head?")
    for name, shape in wanted.items():
        if shape != tensors[name].shape:
            raise TercelError(
                f"{name} in {path} is {list(tensors[name].shape)}, but the head's sizes ask for "
                f"{list(shape)}; config and weights are of different heads"
            )
