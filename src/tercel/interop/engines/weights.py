"""The files of an exported folder, apart from the GGUF draft."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from tercel.draft import DraftModel
from tercel.draft.checkpoint import description
from tercel.file_set import RECORD, WEIGHTS
from tercel.files import as_json

KEEPS_OWN_FILE = ("vllm", "sglang", "trtllm", "openvino")  # tensors keep their names, so tercel.json still fits


def smallest_exact(model: DraftModel) -> torch.dtype:
    """bfloat16 if it holds every weight of the head exactly, else float32."""
    for parameter in model.head.parameters():
        if not torch.equal(parameter.detach().to(torch.bfloat16).float(), parameter.detach().float()):
            return torch.float32
    return torch.bfloat16


def write_weights(model: DraftModel, engine: str, folder: Path, dtype: torch.dtype) -> None:
    """`model.safetensors` under the names that the engine's loader takes, and no tensor it would stop at."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.head.named_parameters():
        renamed = name.replace("midlayer.", "layers.0.") if engine == "speculators" else name
        tensors[renamed] = parameter.detach().to("cpu", dtype).contiguous()
    tensors |= _maps(model, engine)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def _maps(model: DraftModel, engine: str) -> dict[str, Tensor]:
    vocabulary = model.vocabulary
    if engine == "openvino":  # its model has both as buffers, filled with nothing in particular if the file lacks them
        return {"d2t": vocabulary.d2t, "t2d": vocabulary.t2d}
    if not vocabulary.pruned:  # vLLM stops at a map that it has no use for
        return {}
    return {"d2t": vocabulary.d2t} if engine == "trtllm" else {"d2t": vocabulary.d2t, "t2d": vocabulary.t2d}


def write_own_file(model: DraftModel, folder: Path) -> None:
    """`tercel.json`, which no engine reads: with it the folder is read back exactly, history included."""
    (folder / RECORD).write_text(as_json(description(model)), encoding="utf-8")
