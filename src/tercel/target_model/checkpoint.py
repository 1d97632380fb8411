"""What must hold for a checkpoint before its model is used; each check raises `TercelError`."""

from __future__ import annotations

import os
import re
from copy import deepcopy
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tercel import limits
from tercel.errors import TercelError
from tercel.reading import check_readable, read_json, read_shards
from tercel.target_model.snapshot import SHARDS

_CAUSAL_CLASS = re.compile(r"ForCausalLM|LMHeadModel|ForConditionalGeneration")

# names in use for two sizes, which code of a model's own may choose
_LAYERS, _WIDTHS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer"), ("hidden_size", "d_model", "n_embd")

CONFIGS = ("config.json", "generation_config.json")
TEXTS = (
    *CONFIGS,
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.json",
    "chat_template.jinja",
)


def check_folder(folder: Path) -> None:
    """Refuse a folder without a configuration, one that holds a draft head, cut-off safetensors, and shards that lie
    elsewhere."""
    check_readable(folder)
    if not (folder / "config.json").is_file():
        raise TercelError(
            f"{folder} has no config.json, so it is not a model's folder; give the one that `save_pretrained` made"
        )
    config = read_json(folder / "config.json", "save the model again")
    check_texts(folder)
    names = str(config.get("architectures")).lower()
    if (folder / "tercel.json").is_file() or "draft_vocab_size" in config or "eagle" in names:
        raise TercelError(f"{folder} holds a draft head, not a model; give the head's target model here")
    if (index := folder / SHARDS).is_file():
        read_shards(index)
    stored_contents(folder)


def check_texts(folder: Path) -> None:
    """Refuse files of a tokenizer and of settings that are devices or pipes, or enormous: whoever reads them takes them
    whole."""
    for name in TEXTS:
        file = os.path.join(folder, name)
        if os.path.exists(file) and not (os.path.isfile(file) or os.path.isdir(file)):
            raise TercelError(f"{file} is no plain file; save the model again")
        if os.path.isfile(file) and os.path.getsize(file) > limits.JSON_BYTES:
            raise TercelError(f"{file} has more than {limits.JSON_BYTES >> 20} MiB; save the model again")


def stored_contents(folder: Path) -> tuple[int, int]:
    """How many tensors the folder's safetensors hold, and how many numbers they are; from their headers alone."""
    tensors = numbers = 0
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as stored:
                names = list(stored.keys())
                tensors += len(names)
                numbers += sum(prod(stored.get_slice(name).get_shape()) for name in names)
        except (SafetensorError, OSError) as error:
            raise TercelError(f"{file} is damaged or cut off ({one_line(error)}); copy or download it again") from error
    return tensors, numbers


def check_sizes(name: str, config: PretrainedConfig, tensors: int, numbers: int) -> None:
    """Refuse a configuration whose model would be larger than what is stored, before anything is allocated.

    tensors, numbers: how many are stored. Weights that are shared or packed make the two differ by a small factor; in
    models small enough to do no harm, differences are left to `check_complete`, which names the tensors. Of a model
    whose code is its own only the embeddings are known, so only they are compared.
    """
    settings = config.get_text_config().to_dict()
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        settings["num_hidden_layers"] = config.get_text_config().num_hidden_layers  # whatever its own name for it
    for key, count in settings.items():
        layers = key in _LAYERS
        most = max(tensors, limits.LAYERS_FREE) if layers else limits.EXPERTS
        if (layers or "expert" in key) and isinstance(count, int) and count > most:
            raise TercelError(
                f"the configuration of {name} says {key} {count}, but its weights are {tensors:,} tensors; give "
                "weights and configuration of one model"
            )
    wanted = _numbers(config, settings)
    ratio = limits.PACKED_RATIO if getattr(config, "quantization_config", None) else limits.WEIGHTS_RATIO
    if wanted > ratio * numbers + limits.NUMBERS_FREE:
        raise TercelError(
            f"the configuration of {name} asks for {wanted:,} numbers, but its weights have {numbers:,}; give "
            "weights and configuration of one model"
        )


def _numbers(config: PretrainedConfig, settings: dict[str, Any]) -> int:
    """How many numbers the model would have; of one whose code is its own, those of its embeddings."""
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        with torch.device("meta"):  # only the shapes
            model = AutoModelForCausalLM.from_config(deepcopy(config), trust_remote_code=False)
        return sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
    widths = [settings[key] for key in _WIDTHS if isinstance(settings.get(key), int)]
    vocabulary = settings.get("vocab_size")
    return vocabulary * max(widths, default=1) if isinstance(vocabulary, int) else 0


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
