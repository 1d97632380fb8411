"""What must hold for a checkpoint before its model is used; each check raises `TercelError`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tercel.errors import TercelError

_CAUSAL_CLASS = re.compile(r"ForCausalLM|LMHeadModel|ForConditionalGeneration")


def check_folder(folder: Path) -> None:
    """Refuse a folder without a configuration, one that holds a draft head, and cut-off safetensors."""
    if not (folder / "config.json").is_file():
        raise TercelError(
            f"{folder} has no config.json, so it is not a model's folder; give the one that `save_pretrained` made"
        )
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise TercelError(f"{folder}/config.json is not JSON ({error}); save the model again") from error
    if not isinstance(config, dict):
        raise TercelError(f"{folder}/config.json is not an object of settings; save the model again")
    names = " ".join(config.get("architectures") or []).lower()
    if (folder / "tercel.json").is_file() or "draft_vocab_size" in config or "eagle" in names:
        raise TercelError(f"{folder} holds a draft head, not a model; give the head's target model here")
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise TercelError(f"{file} is damaged or cut off ({one_line(error)}); copy or download it again") from error


def check_causal(name: str, config: PretrainedConfig) -> None:
    """Refuse encoders, encoder-decoders and heads for other tasks, by what their configuration says."""
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    own_code = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    classes = config.architectures or []
    named = not classes or any(_CAUSAL_CLASS.search(one) or one == known for one in classes)
    if config.is_encoder_decoder or not (known or own_code) or not named:
        kind = classes[0] if classes else config.model_type
        raise TercelError(
            f"{name} is not a causal language model but {kind}; give a decoder-only model that predicts the next token"
        )


def check_complete(name: str, loading: dict[str, Any]) -> None:
    """Refuse weights that transformers would make up; `loading` is what `output_loading_info` gives."""
    if mismatched := sorted(loading["mismatched_keys"]):
        key, found, wanted = mismatched[0]
        raise TercelError(
            f"the checkpoint {name} has {key} as {list(found)} where its config.json asks for "
            f"{list(wanted)}; give weights and configuration of one model"
        )
    if missing := sorted(loading["missing_keys"]):
        raise TercelError(
            f"the checkpoint {name} lacks {len(missing)} of the model's weights, such as {missing[0]}; "
            "they would be random, so give a complete checkpoint of this architecture"
        )


def check_finite(name: str, model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Refuse NaN and infinite weights, among them what overflowed in `dtype`."""
    for key, weight in model.named_parameters():
        if not weight.isfinite().all():
            raise TercelError(
                f"{name} has NaN or infinite values in {key} as {str(dtype).removeprefix('torch.')}; "
                "download the checkpoint again, or use bfloat16 or float32 if it overflows float16"
            )


def one_line(error: Exception, limit: int = 300) -> str:
    """The error's text without line breaks, cut at `limit` characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 1] + "…"
