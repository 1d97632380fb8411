"""What each engine would make of an exported folder: its loader imitated, without this project's own reader or head.

A view answers what a user cannot see in a running server, where a wrong reading only lowers acceptance: which layers
are captured, which tensors stay random, which flags hold, whose embeddings are used.
"""

from __future__ import annotations

from pathlib import Path

from tercel.errors import TercelError
from tercel.interop.loaders.chain import draft_logits, frequencies_of, look_up
from tercel.interop.loaders.llamacpp import view_llamacpp
from tercel.interop.loaders.openvino import view_openvino
from tercel.interop.loaders.parts import EngineView
from tercel.interop.loaders.sglang import view_sglang
from tercel.interop.loaders.trtllm import view_trtllm
from tercel.interop.loaders.vllm import view_speculators, view_vllm

__all__ = ["ENGINES", "EngineView", "draft_logits", "frequencies_of", "look_up", "view"]

ENGINES = ("vllm", "sglang", "speculators", "trtllm", "openvino", "llamacpp")


def view(engine: str, folder: Path, num_layers: int, *, target_type: str | None = None) -> EngineView:
    """`folder` as `engine` would load it for a target of `num_layers` layers.

    target_type: the target's `model_type`; SGLang means layer ids otherwise for some families.
    Raises `TercelError`, with the engine's reason, where the engine itself would stop.
    """
    if engine == "vllm":
        return view_vllm(folder, num_layers)
    if engine == "speculators":
        return view_speculators(folder, num_layers)
    if engine == "sglang":
        return view_sglang(folder, num_layers, target_type)
    if engine == "trtllm":
        return view_trtllm(folder, num_layers)
    if engine == "openvino":
        return view_openvino(folder, num_layers)
    if engine == "llamacpp":
        return view_llamacpp(folder, num_layers)
    raise TercelError(f"there is no engine {engine!r}; choose one of {', '.join(ENGINES)}")
