"""Heads of the first EAGLE papers, which join embedding and feature in `fc` before a plain layer: told and read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tercel.draft import DraftModel, DraftVocabulary, Eagle1Config, HeadInfo, TrainingRecord
from tercel.draft.load import build_head, check_tensors
from tercel.errors import TercelError
from tercel.interop.formats.folder import ForeignFolder, size
from tercel.interop.formats.notes import Notes
from tercel.interop.formats.rope import read_rope

FORMAT = "eagle1"
# the target's output layer, which some files repeat; the target itself is there to lend it
_TARGETS_OWN = ("lm_head.weight",)
PREFIXES = ("model.", "ea_layer.")


def is_eagle1(tensors: Mapping[str, Tensor]) -> bool:
    """Whether these are the tensors of an EAGLE-1 or EAGLE-2 head (the two share one layout), under any prefix.

    Their `fc.weight` is `[H, 2H]` (EAGLE, arXiv 2401.15077) and their layer's `q_proj` takes `H`; an EAGLE-3 head
    joins inside the layer, so that its `q_proj` takes `2H` and `hidden_norm` is there.
    """
    names = {_bare(name): tensor for name, tensor in tensors.items()}
    fc, query = names.get("fc.weight"), names.get("layers.0.self_attn.q_proj.weight")
    if fc is None or query is None or fc.ndim != 2 or query.ndim != 2:
        return False
    hidden, width = fc.shape
    return width == 2 * hidden and query.shape[1] == hidden and "layers.0.hidden_norm.weight" not in names


def _bare(name: str) -> str:
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    return name


def read_eagle1(
    path: Path,
    config: Mapping[str, Any],
    stored: Mapping[str, Tensor],
    file: Path,
    *,
    dtype: torch.dtype,
    device: str,
    num_layers: int | None,
) -> DraftModel:
    """An EAGLE-1 or EAGLE-2 head; it drafts any token, with the output layer of the target it is loaded for.

    Raises `TercelError` if its config is incomplete, or config and weights are of different heads.
    """
    notes = Notes()
    notes.holds("format", FORMAT, "fc takes embedding and feature, before a plain layer")
    notes.holds("layer ids", "what enters the target's output layer, after the final norm", "as EAGLE-1 is defined")
    tensors = {_bare(name): tensor for name, tensor in stored.items() if _bare(name) not in _TARGETS_OWN}
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith("rotary_emb.inv_freq")}
    where = path / "config.json"
    settings = _settings(ForeignFolder(config, config, tensors, FORMAT, file, where), notes, num_layers)
    if settings.attention_bias and "layers.0.self_attn.o_proj.bias" not in tensors:  # Qwen2's layers have three of four
        tensors["layers.0.self_attn.o_proj.bias"] = torch.zeros(tensors["fc.weight"].shape[0])
    check_tensors(settings, tensors, file)
    return DraftModel(
        build_head(settings, tensors, file, dtype, device),
        DraftVocabulary.full(settings.vocab_size),
        HeadInfo(None, TrainingRecord(made_by=FORMAT)),
        path,
        warnings=tuple(notes.doubts),
        format=FORMAT,
        conventions=tuple(notes.conventions),
    )


def _settings(s: ForeignFolder, notes: Notes, num_layers: int | None) -> Eagle1Config:
    if size(s.config, "num_hidden_layers", s.where, 1) != 1:
        raise TercelError(f"{s.where} describes an EAGLE-1 head of more than one layer; only those of one are read")
    hidden, heads = size(s.config, "hidden_size", s.where), size(s.config, "num_attention_heads", s.where)
    try:
        return Eagle1Config(
            hidden_size=hidden,
            target_hidden_size=hidden,
            intermediate_size=size(s.config, "intermediate_size", s.where),
            num_attention_heads=heads,
            num_key_value_heads=size(s.config, "num_key_value_heads", s.where, heads),
            head_dim=size(s.config, "head_dim", s.where, max(1, hidden // heads)),
            vocab_size=size(s.config, "vocab_size", s.where),
            draft_vocab_size=size(s.config, "vocab_size", s.where),
            target_num_layers=num_layers,
            feature_layers=() if num_layers is None else (num_layers,),
            rms_norm_eps=float(s.config.get("rms_norm_eps", 1e-6)),
            rope_parameters=read_rope(s, notes),
            max_position_embeddings=size(s.config, "max_position_embeddings", s.where, 2048),
            attention_bias="layers.0.self_attn.q_proj.bias" in s.tensors,
            own_embeddings="embed_tokens.weight" in s.tensors,
            fc_bias="fc.bias" in s.tensors,
        )
    except (TercelError, TypeError, ValueError) as error:
        raise TercelError(f"{s.where}: {error}") from error
