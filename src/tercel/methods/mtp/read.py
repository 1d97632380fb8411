"""The MTP modules in a target's own checkpoint, read as a draft head for it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tercel.draft.binding import repeats
from tercel.draft.checkpoint import Convention, DraftModel, HeadInfo
from tercel.draft.history import TrainingRecord
from tercel.draft.load import build_head, check_plain, check_tensors
from tercel.draft.vocabulary import DraftVocabulary
from tercel.errors import TercelError
from tercel.methods.mtp.families import REPEATED, Found, announced, find_modules
from tercel.methods.mtp.initial import new_config
from tercel.reading import read_json, read_shards
from tercel.target_model.identity import stored_folder
from tercel.target_model.protocol import TargetModel
from tercel.target_model.snapshot import SHARDS, WEIGHTS
from tercel.target_model.stored import StoredTarget
from tercel.train.facts import identity

FORMAT = "mtp"
_EXPERT = re.compile(r"^(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight$")
_TRAIN = "train one for it with `tercel train --method mtp`"


def modules_of(target: TargetModel | StoredTarget) -> Found | None:
    """What the target's own files hold of MTP modules; None if they hold none, or there are no files.

    Raises `TercelError` for files that are damaged.
    """
    layers = target.num_layers
    return None if layers is None else find_modules(_places(stored_folder(target.source)), layers)


def read_mtp(target: TargetModel, dtype: torch.dtype | None = None) -> DraftModel:
    """The MTP modules that come with the target, frozen, in its precision if no other is named; embeddings and output
    layer only if they are not the target's.

    Raises `TercelError` if there are none, or they are damaged or incomplete.
    """
    name, folder = target.source.name, stored_folder(target.source)
    places = _places(folder)
    found = find_modules(places, target.num_layers)
    if folder is None or found is None:
        raise TercelError(_why_none(name, folder))
    tensors = _gathered(found, _read(places, found.names.values()))
    own: dict[str, bool] = {}
    ids = torch.arange(target.vocab_size, device=target.device)
    for setting, tensor, of_target in (
        ("own_embeddings", "embed_tokens.weight", target.embed),
        ("own_output", "lm_head.weight", target.output_rows),
    ):
        own[setting] = tensor in tensors and not repeats(tensors[tensor], of_target(ids))
        if not own[setting]:
            tensors.pop(tensor, None)
    config = new_config(target, target.vocab_size, found.modules, found.family.hidden_first, **own)
    check_tensors(config, tensors, folder)
    known = None if target.tokenizer_or_none is None else identity(target)
    said = announced(read_json(folder / "config.json"))
    warnings: tuple[str, ...] = ()
    if said is not None and said[1] != found.modules:
        warnings = (f"{name} announces {said[1]} MTP modules ({said[0]}), but its files hold {found.modules}",)
    order = "hidden state, embedding" if config.hidden_first else "embedding, hidden state"
    return DraftModel(
        build_head(config, tensors, folder / WEIGHTS, dtype or target.dtype, str(target.device)),
        DraftVocabulary.full(target.vocab_size),
        HeadInfo(known, TrainingRecord(made_by=name, target_name=name)),
        folder,
        warnings,
        FORMAT,
        (
            Convention("modules", str(found.modules), f"names as {found.family.name}'s"),
            Convention("joined as", order, f"names as {found.family.name}'s"),
        ),
    )


def _why_none(name: str, folder: Path | None) -> str:
    file = None if folder is None else folder / "config.json"
    said = announced(read_json(file)) if file is not None and file.is_file() else None
    if said is None:
        return f"{name} comes without an MTP module; {_TRAIN}, and give that as HEAD"
    return (
        f"{name} announces MTP modules ({said[0]} is {said[1]}), but its files hold none: they were left out when it "
        f"was saved again; take the original checkpoint, or {_TRAIN} and give that as HEAD"
    )


def _places(folder: Path | None) -> dict[str, Path]:
    """In which file each tensor of the checkpoint lies; none where there are no files."""
    if folder is None:
        return {}
    single, index = folder / WEIGHTS, folder / SHARDS
    if single.is_file():
        return dict.fromkeys(_names(single), single)
    return {name: folder / file for name, file in read_shards(index).items()} if index.is_file() else {}


def _names(file: Path) -> list[str]:
    try:
        with safe_open(file, framework="pt") as stored:
            return list(stored.keys())
    except (SafetensorError, OSError) as error:
        raise TercelError(f"{file} is truncated or not safetensors ({error}); fetch it again") from error


def _read(places: Mapping[str, Path], names: Iterable[str]) -> dict[str, Tensor]:
    """These tensors alone: the others are the target's, and may be very large."""
    tensors: dict[str, Tensor] = {}
    with ExitStack() as opened:
        files: dict[Path, safe_open] = {}
        for name in dict.fromkeys(names):
            file = places[name]
            try:
                if file not in files:
                    files[file] = opened.enter_context(safe_open(file, framework="pt"))
                tensors |= check_plain({name: files[file].get_tensor(name)}, file)
            except (SafetensorError, OSError, AttributeError, TypeError) as error:
                raise TercelError(f"{name} in {file} cannot be read ({error}); fetch it again") from error
    return tensors


def _gathered(found: Found, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By our names, with the experts of a layer in one tensor, as transformers has them."""
    tensors: dict[str, Tensor] = {}
    experts: dict[str, dict[tuple[int, str], Tensor]] = {}
    for here, there in found.names.items():
        if here.startswith(REPEATED):
            continue
        if match := _EXPERT.match(here):
            place, number, part = match.groups()
            experts.setdefault(place, {})[int(number), part] = stored[there]
        else:
            tensors[here] = stored[there]
    for place, parts in experts.items():
        count = 1 + max(number for number, _ in parts)
        lacking = [f"{place}.{n}.{part}" for n in range(count) for part in ("gate_proj", "up_proj", "down_proj")
                   if (n, part) not in parts]  # fmt: skip
        if lacking:
            raise TercelError(f"the checkpoint's MTP module lacks {lacking[0]}.weight; fetch it again")
        joined = [torch.cat([parts[n, "gate_proj"], parts[n, "up_proj"]]) for n in range(count)]
        tensors[f"{place}.gate_up_proj"] = torch.stack(joined)
        tensors[f"{place}.down_proj"] = torch.stack([parts[n, "down_proj"] for n in range(count)])
    return tensors
