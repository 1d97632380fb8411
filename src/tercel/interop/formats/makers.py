"""Who wrote a folder, told by what its config holds, and the kinds of drafts that are no EAGLE-3 head."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tercel.errors import TercelError
from tercel.interop.formats.folder import section
from tercel.interop.formats.notes import Notes
from tercel.reading import short

SPECULATORS, MODELOPT, ANGELSLIM, SPECFORGE, SGLANG = "speculators", "modelopt", "angelslim", "specforge", "sglang"
LIST = "eagle_aux_hidden_state_layer_ids"
ANGELSLIM_LIST = "aux_hidden_states_layer_ids"

_SPECULATORS_KEYS = ("speculators_model_type", "speculators_config", "transformer_layer_config")
# keys that only ModelOpt's export template puts into eagle_config
_MODELOPT_KEYS = (
    "next_layer_regular",
    "parallel_draft_step",
    "use_input_layernorm_in_first_layer",
    "use_last_layernorm",
    "use_mtp_layernorm",
)
_ANGELSLIM_CLASS = "Eagle3LlamaForCausalLM"
_OTHER_KINDS = (
    ("peagle", "a P-EAGLE head, which drafts all tokens at once"),
    ("dflash", "a DFlash draft, which drafts blocks by diffusion"),
    ("dspark", "a DSpark draft, which drafts blocks"),
    ("medusa", "a set of Medusa heads"),
    ("mtp", "a multi-token prediction layer"),
    ("deepseek", "a head with multi-head latent attention (MLA)"),
    ("kimi", "a head with multi-head latent attention (MLA)"),
)
_WHAT_TO_DO = "tercel takes EAGLE-3 heads with one Llama layer"


def recognise(config: Mapping[str, Any], where: Path, notes: Notes) -> str:
    """The maker: one of the names above; `sglang` is the plain style of SafeAILab, which SGLang reads as it is.

    Raises `TercelError` for configs of other kinds of drafts, naming the kind.
    """
    _refuse_other_kinds(config, where)
    maker, key = _maker(config, section(config, "eagle_config", where), where)
    notes.holds("format", maker, f"{key} in config.json" if key else "a plain config.json")
    return maker


def _maker(config: Mapping[str, Any], eagle: Mapping[str, Any], where: Path) -> tuple[str, str]:
    """The maker and the key that tells."""
    for key in _SPECULATORS_KEYS:
        if key in config:
            return SPECULATORS, key
    for key in _MODELOPT_KEYS:
        if key in eagle:
            return MODELOPT, f"eagle_config.{key}"
    if ANGELSLIM_LIST in config:
        return ANGELSLIM, ANGELSLIM_LIST
    if LIST in eagle:
        return SPECFORGE, f"eagle_config.{LIST}"
    if any(_ANGELSLIM_CLASS in name for name in _architectures(config, where)):
        return ANGELSLIM, f"the architecture {_ANGELSLIM_CLASS}"
    return SGLANG, ""


def _architectures(config: Mapping[str, Any], where: Path) -> tuple[str, ...]:
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise TercelError(f"architectures in {where} must be a list of names, not {short(names)}")
    return tuple(names)


def _refuse_other_kinds(config: Mapping[str, Any], where: Path) -> None:
    kind = config.get("speculators_model_type", "eagle3")
    eagle = section(config, "eagle_config", where)
    described = [str(kind), str(config.get("model_type", "")), *_architectures(config, where)]
    described += [str(section(config, "transformer_layer_config", where).get("model_type", ""))]
    described += [key for key in ("dflash_config", "dspark_config") if config.get(key)]
    for word, meaning in _OTHER_KINDS:
        found = next((name for name in described if word in name.lower()), None)
        if found is not None:
            raise TercelError(f"{where} describes {meaning} ({found}); {_WHAT_TO_DO}")
    if kind != "eagle3":
        raise TercelError(f"{where} describes a draft of the kind {short(kind)}; {_WHAT_TO_DO}")
    if config.get("parallel_drafting") or config.get("mask_token_id") is not None:
        raise TercelError(f"{where} describes a head that drafts in parallel, as P-EAGLE does; {_WHAT_TO_DO}")
    if (eagle.get("parallel_draft_step") or 1) != 1:
        raise TercelError(
            f"{where} describes a head that drafts in parallel (parallel_draft_step {eagle['parallel_draft_step']}); "
            f"{_WHAT_TO_DO}"
        )
    if eagle.get("use_aux_hidden_state") is False:
        raise TercelError(
            f"{where} says use_aux_hidden_state false: the head reads the last hidden state alone, as in EAGLE-1; "
            f"{_WHAT_TO_DO}"
        )
