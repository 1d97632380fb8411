"""Graphs compiled for this machine, and torch tensors as what goes in and comes out of them, without a copy."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import openvino as ov
import torch
from torch import Tensor

_HINTS = {torch.float32: "f32", torch.bfloat16: "bf16"}


@cache
def core() -> ov.Core:
    return ov.Core()


class CompiledGraph:
    """A graph that computes in the precision of `dtype`, with as many threads as torch has now. Not for two threads."""

    def __init__(self, model: ov.Model, dtype: torch.dtype) -> None:
        settings = {
            "INFERENCE_PRECISION_HINT": _HINTS[dtype],
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            "PERFORMANCE_HINT": "LATENCY",
            "NUM_STREAMS": 1,
            "ENABLE_CPU_PINNING": False,  # two processes would be pinned to the same cores
        }
        self._request = core().compile_model(model, "CPU", settings).create_infer_request()
        self._held: list[Tensor | None] = [None] * len(model.inputs)
        self._outputs: Sequence[Tensor] = ()

    def run(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Compute `outputs`, contiguous tensors of the right shapes, from contiguous `inputs`."""
        for place, (tensor, before) in enumerate(zip(inputs, self._held, strict=True)):
            if before is None or not _same_memory(tensor, before):
                self._request.set_input_tensor(place, _shared(tensor))
            self._held[place] = tensor  # OpenVINO knows only where it lies
        for place, tensor in enumerate(outputs):
            self._request.set_output_tensor(place, _shared(tensor))
        self._outputs = outputs
        self._request.infer()


def _same_memory(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape


def _shared(tensor: Tensor) -> ov.Tensor:
    if tensor.dtype == torch.bfloat16:  # which numpy has not
        return ov.Tensor(tensor.view(torch.int16).numpy(), list(tensor.shape), ov.Type.bf16)
    return ov.Tensor(tensor.numpy(), shared_memory=True)
