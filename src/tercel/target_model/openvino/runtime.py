"""Graphs compiled for this machine, and torch tensors as what goes in and comes out of them, without a copy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from functools import cache
from typing import Any

import openvino as ov
import torch
from torch import Tensor

BUCKETS = (0, 1, 2, 4, 8, 16, 32, 64, 128)
_HINTS = {torch.float32: "f32", torch.bfloat16: "bf16"}


@cache
def core() -> ov.Core:
    return ov.Core()


class CompiledGraph:
    """A graph that computes in the precision of `dtype`, with as many threads as torch has now. Not for two threads.

    When it meets other sizes than the last time, it prepares all its nodes anew, which can take as long as to run them
    (9 ms beside 15 for a block of eight of the default target). So sizes that come again and again are run by instances
    of their own, weights included, up to `spare` of them; then the one that was not used for longest is handed on.
    """

    def __init__(self, model: ov.Model, dtype: torch.dtype, spare: int = 0, often: int = 1) -> None:
        self._model, self._spare, self._often = model, spare, often
        self._settings = {
            "INFERENCE_PRECISION_HINT": _HINTS[dtype],
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            "PERFORMANCE_HINT": "LATENCY",
            "NUM_STREAMS": 1,
            "ENABLE_CPU_PINNING": False,  # two processes would be pinned to the same cores
        }
        self._shared = _Instance(model, self._settings)
        self._own: dict[Hashable, _Instance] = {}  # by sizes, the last used last
        self._met: Counter[Hashable] = Counter()  # sizes without an instance

    def run(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], sizes: Hashable = None) -> None:
        """Compute `outputs`, contiguous tensors of the right shapes, from contiguous `inputs`. sizes: what their shapes
        hang on, if they are expected again."""
        self._instance(sizes).run(inputs, outputs)

    def _instance(self, sizes: Hashable) -> _Instance:
        found = self._own.pop(sizes, None)
        if found is None:
            self._met[sizes] += 1
            if sizes is None or not self._spare or self._met[sizes] < self._often:
                return self._shared
            del self._met[sizes]
            if len(self._own) < self._spare:
                found = _Instance(self._model, self._settings)
            else:
                found = self._own.pop(next(iter(self._own)))
        self._own[sizes] = found
        return found


class _Instance:
    def __init__(self, model: ov.Model, settings: Mapping[str, Any]) -> None:
        self._request = core().compile_model(model, "CPU", dict(settings)).create_infer_request()
        self._held: list[Tensor | None] = [None] * len(model.inputs)
        self._outputs: Sequence[Tensor] = ()

    def run(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        for place, (tensor, before) in enumerate(zip(inputs, self._held, strict=True)):
            if before is None or not _same_memory(tensor, before):
                self._request.set_input_tensor(place, _shared(tensor))
            self._held[place] = tensor  # OpenVINO knows only where it lies
        for place, tensor in enumerate(outputs):
            self._request.set_output_tensor(place, _shared(tensor))
        self._outputs = outputs
        self._request.infer()


def bucket(size: int, sizes: Sequence[int] = BUCKETS) -> int:
    """The next of few `sizes`, ascending, to which blocks are filled up; itself past the last."""
    return next((one for one in sizes if one >= size), size)


def _same_memory(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape


def _shared(tensor: Tensor) -> ov.Tensor:
    if tensor.dtype == torch.bfloat16:  # which numpy has not
        return ov.Tensor(tensor.view(torch.int16).numpy(), list(tensor.shape), ov.Type.bf16)
    return ov.Tensor(tensor.numpy(), shared_memory=True)
