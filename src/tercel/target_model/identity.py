"""Which model this is: one digest of its weights and of the settings that change its outputs.

A head belongs to one target, and cached features and runs do. So the digest must not depend on how the target was
loaded: it is taken from the values that the checkpoint stores, before any cast. float16 rounds bfloat16's numbers,
and lets large and small ones overflow, so no digest of the loaded weights could be the same in both.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from tercel.reading import read_shards
from tercel.target_model.snapshot import SHARDS, WEIGHTS, cached_folder
from tercel.target_model.sources import Source
from tercel.target_model.structure import rope_kinds

SAMPLES = 64  # of every tensor
SCHEME = "2-"  # digests without it are of the first scheme: weights and sizes alone

# Settings that name, load or train a model, but change nothing of what it computes.
_IGNORED = {
    "architectures",
    "auto_map",
    "chunk_size_feed_forward",
    "dtype",
    "gradient_checkpointing",
    "id2label",
    "label2id",
    "name_or_path",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "pretraining_tp",
    "problem_type",
    "quantization_config",
    "return_dict",
    "router_aux_loss_coef",
    "task_specific_params",
    "tokenizer_class",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}
_IGNORED_PARTS = ("_implementation", "token_id", "dropout", "pdrop", "initializer", "init_std", "summary_")
_LIMITS = ("max_position_embeddings", "n_positions", "max_seq_len")

Samples = Mapping[str, Tensor]  # bfloat16 `[<= SAMPLES]` of each tensor, by its name


def fingerprint(config: PretrainedConfig, samples: Samples) -> str:
    """Digest of the settings of a text configuration and of a sample of every weight, whatever the dtype loaded."""
    digest = hashlib.sha256(json.dumps(_settings(config), sort_keys=True, default=str).encode())
    for name in sorted(samples):
        digest.update(name.encode())
        digest.update(samples[name].view(torch.int16).numpy().tobytes())
    return SCHEME + digest.hexdigest()[:16]


def first_fingerprint(model: PreTrainedModel, sizes: tuple[int, int, int], samples: Samples) -> str:
    """The digest that heads recorded before configurations were part of it; sizes: layers, width, vocabulary."""
    digest = hashlib.sha256(" ".join(map(str, sizes)).encode())
    for name, parameter in model.named_parameters():
        digest.update(name.encode())
        sample = samples[name] if name in samples else _sample(parameter)
        digest.update(sample.float().numpy().tobytes())
    return digest.hexdigest()[:16]


def stored_samples(source: Source) -> Samples | None:
    """Samples of the tensors as the checkpoint's safetensors store them; None where they are not in one folder."""
    folder = stored_folder(source)
    if folder is None:
        return None
    samples: dict[str, Tensor] = {}
    for file in _weight_files(folder):
        with safe_open(file, framework="pt") as tensors:  # maps the file: only what is sampled is read
            for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                samples[name] = _sample(tensors.get_tensor(name))
    return samples or None


def stored_folder(source: Source) -> Path | None:
    """The folder of the source's files on this machine; None for one of the Hub that was not fetched, or elsewhere."""
    return cached_folder(source.path, source.revision) if source.kind == "hub" else Path(source.path)


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Short digest of the tokenizer's vocabulary."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return hashlib.sha256(repr(vocabulary).encode()).hexdigest()[:16]


def held_samples(model: PreTrainedModel) -> Samples:
    """Samples of the weights in memory, for a model that was not loaded from files."""
    return {name: _sample(parameter) for name, parameter in model.named_parameters()}


def _weight_files(folder: Path) -> list[Path]:
    """The files that `from_pretrained` reads: a folder may hold the same weights a second time, under other names."""
    single, index = folder / WEIGHTS, folder / SHARDS
    if single.is_file():
        return [single]
    if not index.is_file():
        return []
    return [folder / name for name in sorted(set(read_shards(index).values()))]


def _sample(tensor: Tensor) -> Tensor:
    flat = tensor.detach().flatten()
    return flat[:: max(1, flat.numel() // SAMPLES)][:SAMPLES].to("cpu", torch.bfloat16)


def _settings(config: PretrainedConfig) -> dict[str, Any]:
    """What the architecture knows and differs from its defaults, so that neither a setting that a later transformers
    adds nor what other tools leave in config.json changes a digest."""
    usual = type(config)().to_dict()
    settings = {key: value for key, value in config.to_dict().items() if key in usual and usual[key] != value}
    kept = {key: _plain(value) for key, value in settings.items() if not _is_ignored(key)}
    if {kind.get("rope_type", "default") for kind in rope_kinds(config)} == {"default"}:
        # then a limit only says how long texts may be
        kept = {key: value for key, value in kept.items() if key not in _LIMITS}
    return {"model_type": config.model_type, **kept}


def _is_ignored(key: str) -> bool:
    return key in _IGNORED or key.startswith("_") or any(part in key for part in _IGNORED_PARTS)


def _plain(value: Any) -> Any:
    """One spelling of equal numbers: files write 10000 or 10000.0."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value
