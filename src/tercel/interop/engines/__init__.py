"""The engines that heads are written for: one module each says all there is to say of it.

A new engine is its module here, its line in `ENGINES`, and a reader of its own in `interop/loaders`.
"""

from __future__ import annotations

from tercel.errors import TercelError
from tercel.interop.engines.base import ExportJob, ServingEngine
from tercel.interop.engines.llamacpp import LlamaCpp
from tercel.interop.engines.openvino import OpenVino
from tercel.interop.engines.sglang import Sglang
from tercel.interop.engines.trtllm import TensorRtLlm
from tercel.interop.engines.vllm import Speculators, Vllm

__all__ = ["ENGINES", "SERVED_AND_ASKED", "ExportJob", "ServingEngine", "as_given", "find"]

ENGINES: dict[str, ServingEngine] = {
    engine.name: engine for engine in (Vllm(), Sglang(), Speculators(), TensorRtLlm(), OpenVino(), LlamaCpp())
}
# started by one line with a folder, and asked by `tercel doctor` how the head does there: what a head's card proposes
SERVED_AND_ASKED = tuple(name for name, engine in ENGINES.items() if engine.serve_command and engine.tells_counters)


def find(name: str) -> ServingEngine:
    """Raises `TercelError` for a name that is no engine's."""
    if name not in ENGINES:
        raise TercelError(f"there is no engine {name!r}; choose one of {', '.join(ENGINES)}")
    return ENGINES[name]


def as_given(name: str, head_format: str) -> ServingEngine:
    """What the engine `name` makes of a folder in `head_format`: that format's own way, where the engine has one."""
    own = ENGINES.get(head_format)
    return own if own is not None and own.run_by == name else find(name)
