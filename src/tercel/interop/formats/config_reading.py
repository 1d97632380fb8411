"""A head's configuration from its config.json and its tensors together; where they contradict, both are named."""

from __future__ import annotations

import re

import torch

from tercel.draft import HeadConfig
from tercel.draft.config import engine_default_layers
from tercel.errors import TercelError
from tercel.interop.formats.flags import read_flags
from tercel.interop.formats.folder import ForeignFolder, size
from tercel.interop.formats.layer_ids import Meaning, listed_layers, settle
from tercel.interop.formats.makers import SPECULATORS
from tercel.interop.formats.notes import Notes
from tercel.interop.formats.rope import read_rope
from tercel.reading import short

# what LlamaConfig takes where a config does not say
DEFAULT_EPS, DEFAULT_POSITIONS = 1e-6, 2048


def read_config(s: ForeignFolder, notes: Notes, num_layers: int | None, layer_ids: Meaning | None) -> HeadConfig:
    """Sizes, feature layers and flags; conventions and doubts go to `notes`.

    num_layers: the target's depth, if known; layer_ids: what listed ids mean, if the user says so.
    Raises `TercelError` for a config that is incomplete, contradicts the tensors or itself, or asks for what no
    EAGLE-3 head of one Llama layer has.
    """
    _check_layer(s)
    hidden = size(s.body, "hidden_size", s.where)
    heads = size(s.body, "num_attention_heads", s.where)
    wide = _width(s, hidden)
    layers = _layers(s, wide, notes, num_layers, layer_ids)
    vocabulary, drafted = _vocabulary_sizes(s)
    flags = read_flags(s, notes)
    _say_embeddings(s, hidden != wide, notes)
    if "lm_head.weight" not in s.tensors:
        rows = "" if drafted == vocabulary else ", in the rows of the draft vocabulary"
        notes.holds("output layer", f"the target's{rows}", "lm_head.weight is not in the file")
    try:
        config = HeadConfig(
            hidden_size=hidden,
            target_hidden_size=wide,
            intermediate_size=size(s.body, "intermediate_size", s.where),
            num_attention_heads=heads,
            num_key_value_heads=size(s.body, "num_key_value_heads", s.where, heads),
            head_dim=_head_dim(s, hidden, heads),
            vocab_size=vocabulary,
            draft_vocab_size=drafted,
            target_num_layers=None,
            feature_layers=layers,
            rms_norm_eps=_eps(s, notes),
            rope_parameters=read_rope(s, notes),
            max_position_embeddings=_positions(s, notes),
            own_embeddings="embed_tokens.weight" in s.tensors,
            own_output="lm_head.weight" in s.tensors,
            num_decoder_layers=_layers_held(s),
            **vars(flags),
        )
        return config if num_layers is None or not config.fits_depth(num_layers) else config.placed(num_layers)
    except TercelError as error:
        prefix = "" if str(s.where) in str(error) else f"{s.where}: "
        raise TercelError(f"{prefix}{error}") from error


def _check_layer(s: ForeignFolder) -> None:
    """The kind of layer: of the Llama sort, attending to everything, and as many as there are."""
    if not s.body:
        raise TercelError(f"{s.where} has no transformer_layer_config, where speculators keeps sizes; fetch it again")
    said, held = size(s.body, "num_hidden_layers", s.where, 1), _layers_held(s)
    if said != held:
        raise TercelError(
            f"{s.where} says num_hidden_layers {said}, but {s.file} holds tensors of {held}; config and weights are of "
            "different heads"
        )
    activation = s.body.get("hidden_act", "silu")
    if activation != "silu":
        raise TercelError(f"{s.where} says hidden_act {short(activation)}, but tercel takes EAGLE-3 heads with silu")
    if s.maker == SPECULATORS and s.body.get("model_type") == "qwen3":
        raise TercelError(  # its tensors q_norm and k_norm would have been refused by name before
            f"{s.where} describes a Qwen3 layer, which norms queries and keys, but {s.file} holds no q_norm; "
            "config and weights are of different heads"
        )
    kinds = s.body.get("layer_types") or []
    if s.body.get("use_sliding_window") or (isinstance(kinds, list) and "sliding_attention" in kinds[:1]):
        raise TercelError(f"{s.where} describes a head that attends within a sliding window, which tercel does not do")
    if s.body.get("mlp_bias") and not any(name.endswith("_proj.bias") and ".mlp." in name for name in s.tensors):
        raise TercelError(f"{s.where} says mlp_bias true, but {s.file} holds no such bias; tercel's heads have none")


def _layers_held(s: ForeignFolder) -> int:
    """How many decoder layers there are tensors of."""
    return max((int(m[1]) for name in s.tensors if (m := re.match(r"layers\.(\d{1,6})\.", name))), default=0) + 1


def _width(s: ForeignFolder, hidden: int) -> int:
    """The target's hidden size, checked against `fc`."""
    fc = s.tensors.get("fc.weight")
    if fc is None or fc.ndim != 2:
        raise TercelError(f"{s.file} holds no matrix fc.weight, which fuses the target's layers; is it a head?")
    key = "target_hidden_size" if s.config.get("target_hidden_size") is not None else "hidden_size"
    wide = size(s.config, key, s.where) if key == "target_hidden_size" else hidden
    if fc.shape[0] != hidden:
        raise TercelError(
            f"fc.weight in {s.file} has {fc.shape[0]} rows, but {s.where} says hidden_size {hidden}; "
            "config and weights are of different heads"
        )
    if fc.shape[1] % wide:
        raise TercelError(
            f"fc.weight in {s.file} takes {fc.shape[1]} columns, which is not a multiple of the target's width {wide} "
            f"({key} in {s.where}); is target_hidden_size missing or wrong?"
        )
    return wide


def _layers(
    s: ForeignFolder, wide: int, notes: Notes, num_layers: int | None, layer_ids: Meaning | None
) -> tuple[int, ...]:
    """Feature layers as inputs, as many as `fc` takes; empty where the config leaves them to the engines' default."""
    listed = listed_layers(s, notes)
    columns = s.tensors["fc.weight"].shape[1]
    captured = columns // wide
    said = size(s.config, "num_aux_hidden_states", s.where, captured)
    if said != captured:
        raise TercelError(
            f"{s.where} says num_aux_hidden_states {said}, but fc.weight in {s.file} takes {columns} = {captured} x "
            f"{wide} columns; config and weights are of different heads"
        )
    if listed is None:
        if layer_ids is not None:
            raise TercelError(f"{s.where} lists no layers, so there is nothing to take as {layer_ids}s")
        if captured != 3:
            raise TercelError(
                f"fc.weight in {s.file} takes {columns} = {captured} x {wide} columns, but {s.where} lists no layers, "
                f"which means three; target_hidden_size or the list is missing"
            )
        usual = "2, L//2, L-3" if num_layers is None else ", ".join(map(str, engine_default_layers(num_layers)))
        notes.holds("layer ids", f"inputs {usual} of {num_layers or 'L'} layers", "not listed: the engines' default")
        return ()
    if len(listed.ids) != captured:
        raise TercelError(
            f"{listed.place} lists {len(listed.ids)} layers, but fc.weight in {s.file} takes {columns} = "
            f"{captured} x {wide} columns; config and weights are of different heads"
        )
    layers = settle(listed, num_layers, layer_ids, notes)
    if list(layers) != sorted(layers):
        notes.doubt(
            f"{listed.place} does not go from low to high, but engines capture in that order: they would mix up the "
            "columns of fc; here the order of the list is kept"
        )
    return layers


def _vocabulary_sizes(s: ForeignFolder) -> tuple[int, int]:
    """The target's vocabulary and the draft's, checked against `lm_head`, `t2d`, `d2t` and the embeddings."""
    output = s.tensors.get("lm_head.weight")
    if output is not None and output.ndim != 2:
        raise TercelError(f"lm_head.weight in {s.file} is {list(output.shape)}, but it must be a matrix")
    whole = size(s.body, "vocab_size", s.where)
    rows = size(s.config, "draft_vocab_size", s.where, whole) if output is None else output.shape[0]
    said = s.config.get("draft_vocab_size")
    drafted = size(s.config, "draft_vocab_size", s.where, whole)
    if rows == whole and drafted > whole:
        raise TercelError(
            f"{s.where} says vocab_size {whole} and draft_vocab_size {drafted}, but lm_head.weight in {s.file} has "
            f"{rows} rows: the two are exchanged"
        )
    if rows != drafted:
        how = f"says draft_vocab_size {drafted}" if said is not None else f"has no draft_vocab_size beside {whole}"
        raise TercelError(
            f"lm_head.weight in {s.file} has {rows} rows, but {s.where} {how}; correct it, or the weights are of "
            "another head"
        )
    for name in ("t2d", "embed_tokens.weight"):
        tensor = s.tensors.get(name)
        if tensor is not None and tensor.shape[:1] != (whole,):
            mixed = f" (the draft's {rows}, it seems)" if whole == rows else ""
            raise TercelError(
                f"{name} in {s.file} is {list(tensor.shape)}, with a row for each token of the target, but {s.where} "
                f"says vocab_size {whole}{mixed}; correct it"
            )
    return whole, drafted


def _head_dim(s: ForeignFolder, hidden: int, heads: int) -> int:
    if s.body.get("head_dim") is not None:
        return size(s.body, "head_dim", s.where)
    usual = hidden // heads
    query = s.tensors.get("midlayer.self_attn.q_proj.weight")
    if query is not None and query.ndim == 2 and query.shape[0] != usual * heads and query.shape[0] % heads == 0:
        raise TercelError(
            f"{s.where} has no head_dim, which means {hidden} // {heads} = {usual}, but q_proj in {s.file} has "
            f"{query.shape[0]} rows: add head_dim {query.shape[0] // heads}"
        )
    return usual


def _eps(s: ForeignFolder, notes: Notes) -> float:
    value = s.body.get("rms_norm_eps")
    if value is None:
        notes.holds("rms_norm_eps", f"{DEFAULT_EPS:g}", "not said; what a Llama config takes then")
    return DEFAULT_EPS if value is None else value


def _positions(s: ForeignFolder, notes: Notes) -> int:
    said = s.body.get("max_position_embeddings")
    limit = size(s.body, "max_position_embeddings", s.where, DEFAULT_POSITIONS)
    if limit <= DEFAULT_POSITIONS:
        how = "declares" if said is not None else "does not say its max_position_embeddings, which means"
        notes.doubt(
            f"the head {how} only {limit:,} positions: engines fail or slow down beyond them if the target's context "
            "is longer"
        )
    return limit


def _say_embeddings(s: ForeignFolder, needed: bool, notes: Notes) -> None:
    own = "embed_tokens.weight" in s.tensors
    if needed and not own:
        raise TercelError(
            f"{s.where} says hidden_size {s.body['hidden_size']} beside target_hidden_size "
            f"{s.config['target_hidden_size']}, so the head needs embeddings of its own, but {s.file} holds no "
            "embed_tokens.weight"
        )
    value = "its own (SGLang takes the target's unless the widths differ)" if own else "the target's"
    notes.holds("embeddings", value, f"embed_tokens.weight {'is' if own else 'is not'} in the file")


def say_files(s: ForeignFolder, left_out: tuple[str, ...], notes: Notes) -> None:
    """Doubts that come from the files alone: precision, quantisation inherited from a target, tensors left out."""
    if any(tensor.dtype is torch.float16 for tensor in s.tensors.values()):
        notes.doubt("the weights are float16, which overflows on some targets (Qwen2's, for one): use bfloat16")
    if s.config.get("quantization_config") or s.body.get("quantization_config"):
        notes.doubt(
            "the config has a quantization_config, probably the target's, but the weights are plain: remove it, since "
            "engines would look for quantised ones"
        )
    if s.body.get("tie_word_embeddings") is True and "lm_head.weight" in s.tensors:
        notes.doubt(
            "the config says tie_word_embeddings true, so SGLang would take the embeddings for lm_head; the head's own "
            "lm_head is taken here"
        )
    if left_out:
        notes.holds("tensors left out", ", ".join(left_out), "not needed: made again, or the target's")
