"""What an engine would make of a head's folder as it lies there, before it is started with it."""

from __future__ import annotations

from pathlib import Path

from tercel.draft import DraftModel
from tercel.errors import TercelError
from tercel.interop.loaders import view
from tercel.interop.proof import compare

TRTLLM_OPTIONS = "trtllm.yaml"


def is_speculators(model: DraftModel) -> bool:
    """Whether the folder is one that vLLM is given in place of the target."""
    return model.format == "speculators"


def misread_by(engine: str, model: DraftModel, folder: Path, target_type: str | None) -> str | None:
    """Why `engine` would not load the head in `folder` as `model`, which was read from it; None if it would.

    engine: vllm, speculators, sglang or trtllm. target_type: the target's `model_type`, which SGLang goes by.
    """
    depth = model.head.config.target_num_layers
    if depth is None:
        return "it is not known how many layers its target has, so nothing could be checked"
    if engine == "trtllm" and not (folder / TRTLLM_OPTIONS).is_file():
        return f"the folder has no {TRTLLM_OPTIONS} with TensorRT-LLM's settings"
    try:
        compare(model, view(engine, folder, depth, target_type=target_type))
    except TercelError as error:
        return str(error)
    return None
