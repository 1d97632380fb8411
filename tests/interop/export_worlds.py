"""Tiny heads exported, and folders spoilt afterwards."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from tercel.draft import DraftModel, DraftVocabulary, HeadInfo, MeasuredRecord, TargetIdentity, TrainingRecord
from tercel.draft.history import HeldOut
from tercel.interop.export import ExportReport, export_head
from tercel.target_model.sources import Source
from tercel.target_model.stored import StoredTarget
from tests.draft.heads_for_tests import some_vocabulary, tiny_head, tiny_head_config
from tests.tiny import VOCAB

DEPTH = 8
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
NAMED = Source("org/tiny", "org/tiny", "hub", None)
TARGET: dict[str, Any] = {
    "num_hidden_layers": DEPTH,
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
}


def draft(**overrides: Any) -> DraftModel:
    """A head on layers that are no engine's default, whose RoPE base is not the usual one either."""
    values = {
        "feature_layers": (2, 3, 6),
        "target_num_layers": DEPTH,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        "max_position_embeddings": 512,
        **overrides,
    }
    config = tiny_head_config(**values)
    pruned = config.draft_vocab_size < VOCAB
    vocabulary = some_vocabulary(config.draft_vocab_size) if pruned else DraftVocabulary.full(VOCAB)
    measured = MeasuredRecord(held_out=HeldOut(tau=1.7, steps=9, alpha=(0.5, 0.4)))
    info = HeadInfo(TargetIdentity("tiny", "w", "t"), TrainingRecord(steps=3), measured)
    return DraftModel(tiny_head(config), vocabulary, info)


def export(model: DraftModel, engine: str, out: Path, gguf: Path | None = None, **options: Any) -> ExportReport:
    config = model.head.config
    sizes = {"hidden_size": config.target_hidden_size, "vocab_size": config.vocab_size, "num_attention_heads": 1}
    settings = AutoConfig.for_model(**{**TARGET, **sizes, **options.pop("target", {})})
    return export_head(model, engine, out, StoredTarget(NAMED, settings), target_gguf=gguf, **options)


def change_config(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    change(config)
    file.write_text(json.dumps(config))


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    file = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def random_like(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(9))
