"""Any EAGLE-3 head as this package's: what everything that takes a HEAD reads it with."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from tercel.draft import DraftModel, HeadConfig, HeadInfo, load_head
from tercel.draft.binding import placed
from tercel.draft.history import FROZEN, TRAINED, TrainingRecord
from tercel.draft.kinds import methods_of
from tercel.draft.load import build_head, check_tensors, described, read_vocabulary
from tercel.errors import TercelError
from tercel.interop.formats.config_reading import read_config, say_files
from tercel.interop.formats.eagle1 import is_eagle1, read_eagle1
from tercel.interop.formats.files import read_weights
from tercel.interop.formats.folder import ForeignFolder, section
from tercel.interop.formats.makers import ANGELSLIM, SPECULATORS, recognise
from tercel.interop.formats.names import native
from tercel.interop.formats.notes import Notes
from tercel.interop.formats.rope import DEFAULT_THETA
from tercel.reading import check_readable, read_json

LayerIds = Literal["auto", "input", "output"]


def read_head(
    path: Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    num_layers: int | None = None,
    layer_ids: LayerIds = "auto",
) -> DraftModel:
    """Read a folder with a head of this package, SafeAILab, SGLang, SpecForge, speculators, ModelOpt or AngelSlim.

    num_layers: the target's depth, if known; a config that leaves the feature layers to it comes back `placed`, unless
    it cannot be, which is for `draft.misfits` to say.
    layer_ids: what ids listed by a foreign folder mean, where that is doubted. How a foreign folder was read is in
    `conventions`, what may be wrong with it in `warnings`; the target's identity is not recorded there, so that
    `info.target` is None.
    Raises `TercelError` for files that are missing, damaged, of another kind of draft, or contradict each other.
    Nothing in the folder is executed; pickles are read as tensors only.
    """
    if not path.is_dir():
        raise TercelError(f"there is no head at {path}: give a folder with config.json and weights")
    check_readable(path)
    if (path / "tercel.json").is_file():
        return _own(path, dtype, device, num_layers, layer_ids)
    where = path / "config.json"
    if not where.is_file():
        raise TercelError(f"{path} has no config.json, so it is unknown what its weights are; fetch the whole folder")
    config = read_json(where)
    notes = Notes()
    weights = read_weights(path)
    if is_eagle1(weights.tensors):
        return read_eagle1(
            path, config, weights.tensors, weights.file, dtype=dtype, device=device, num_layers=num_layers
        )
    maker = recognise(config, where, notes)
    tensors, left_out = native(weights.tensors, weights.file)
    body = section(config, "transformer_layer_config", where) if maker == SPECULATORS else config
    found = ForeignFolder(config, body, tensors, maker, weights.file, where)
    head = read_config(found, notes, num_layers, None if layer_ids == "auto" else layer_ids)
    say_files(found, left_out, notes)
    _doubt_trained_base(found, head, notes)
    maps = _maps(found, head, notes)
    check_tensors(head, maps, weights.file)
    vocabulary = read_vocabulary(maps, head, weights.file)
    told = TrainingRecord(
        made_by=maker, target_name=_target_name(config, where), embeddings=_embeddings(config, head)
    )
    return DraftModel(
        build_head(head, tensors, weights.file, dtype, device),
        vocabulary,
        HeadInfo(None, told),
        path,
        warnings=tuple(notes.doubts),
        format=maker,
        conventions=tuple(notes.conventions),
    )


def methods_of_folder(path: Path) -> tuple[str, ...]:
    """The methods that the head in a folder is of, the usual one first. Raises `TercelError` as `read_head`."""
    if (told := path / "tercel.json").is_file():
        config, info = described(told)  # which weights need not be read for
    else:
        model = read_head(path)
        config, info = model.head.config, model.info
    return methods_of(config.kind, info.training)


def _own(path: Path, dtype: torch.dtype, device: str, num_layers: int | None, layer_ids: LayerIds) -> DraftModel:
    if layer_ids != "auto":
        raise TercelError(f"{path} is a head of tercel, whose tercel.json says what ids mean; leave layer-ids out")
    model = load_head(path, dtype=dtype, device=device)
    if num_layers is not None and model.head.config.fits_depth(num_layers):
        return placed(model, num_layers)
    return model


def _maps(found: ForeignFolder, head: HeadConfig, notes: Notes) -> dict[str, Tensor]:
    """The tensors with the vocabulary's maps as they are meant: unused ones dropped, wrong ones refused or doubted.

    A whole vocabulary needs none, and trainers then leave theirs as they were made (SpecForge's t2d all true,
    AngelSlim's all false).
    """
    tensors = dict(found.tensors)
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    pruned = head.draft_vocab_size != head.vocab_size
    if not pruned and (d2t is None or not bool(d2t.any())):
        tensors.pop("t2d", None)
        notes.holds("vocabulary", "whole: a draft id is the target's id", "sizes in config.json, and no offsets in d2t")
        return tensors
    if d2t is not None and t2d is not None and _absolute(d2t, t2d):
        raise TercelError(
            f"d2t in {found.file} holds ids of the target's tokens, not what to add to a draft id, so that engines "
            "would draft other tokens; subtract 0, 1, 2, … from it"
        )
    if pruned and d2t is not None and not bool(d2t.any()):
        notes.doubt(
            f"d2t is all zeros: the head drafts the first {head.draft_vocab_size:,} tokens of the target; was the map "
            "saved at all?"
        )
    if d2t is not None:
        backed = ", borne out by t2d" if t2d is not None else ""
        notes.holds("vocabulary", "offsets: d2t[i] + i is the target's id", f"d2t{backed}")
    return tensors


def _absolute(d2t: Tensor, t2d: Tensor) -> bool:
    chosen = torch.nonzero(t2d.flatten())[:, 0]
    if d2t.is_floating_point() or d2t.shape != chosen.shape or not len(chosen):
        return False
    return bool(chosen[-1] >= len(chosen)) and torch.equal(d2t.long().sort().values, chosen)


def _doubt_trained_base(found: ForeignFolder, head: HeadConfig, notes: Notes) -> None:
    """AngelSlim (0.5) trains plain RoPE with the base 10000 whatever its config says (llama_eagle3.py, _init_rope)."""
    theta = head.rope_parameters["rope_theta"]
    if found.maker == ANGELSLIM and head.rope_parameters["rope_type"] == "default" and theta != DEFAULT_THETA:
        notes.doubt(
            f"the config says rope_theta {theta:g}, but AngelSlim's trainer (0.5) takes {DEFAULT_THETA:.0f} whatever "
            "it says; if acceptance is low, try that"
        )


def _embeddings(config: dict[str, Any], head: HeadConfig) -> str | None:
    """What speculators says of the head's own embeddings; of others' it is unknown whether they learned."""
    learns = config.get("embed_requires_grad")
    if not head.own_embeddings or not isinstance(learns, bool):
        return None
    return TRAINED if learns else FROZEN


def _target_name(config: dict[str, Any], where: Path) -> str | None:
    verifier = section(section(config, "speculators_config", where), "verifier", where)
    name = verifier.get("name_or_path")
    return name if isinstance(name, str) and name else None
