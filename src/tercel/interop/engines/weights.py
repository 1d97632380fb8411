"""Weights of an exported folder, and this package's own record beside them."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from tercel.draft import DraftModel
from tercel.draft.checkpoint import description
from tercel.file_set import RECORD, WEIGHTS
from tercel.files import as_json, put_text
from tercel.interop.engines.base import FolderEngine


def smallest_exact(model: DraftModel) -> torch.dtype:
    """bfloat16 if it holds every weight of the head exactly, else float32."""
    for parameter in model.head.parameters():
        if not torch.equal(parameter.detach().to(torch.bfloat16).float(), parameter.detach().float()):
            return torch.float32
    return torch.bfloat16


def write_weights(model: DraftModel, engine: FolderEngine, folder: Path, dtype: torch.dtype) -> None:
    """`model.safetensors` under the names that the engine's loader takes, and no tensor it would stop at."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.head.named_parameters():
        tensors[engine.tensor_name(name)] = parameter.detach().to("cpu", dtype).contiguous()
    tensors |= engine.maps(model.vocabulary)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def write_own_file(model: DraftModel, folder: Path) -> None:
    """`tercel.json`, which no engine reads: with it the folder is read back exactly, history included."""
    put_text(folder / RECORD, as_json(description(model)))
