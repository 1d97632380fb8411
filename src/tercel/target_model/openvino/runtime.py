"""Graphs compiled for this machine, and torch tensors as what goes in and comes out of them, without a copy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from functools import cache
from typing import Any

import openvino as ov
import torch
from torch import Tensor

from tercel.target_model.int8 import GROUP

BUCKETS = (0, 1, 2, 4, 8, 16, 32, 64, 128)
_HINTS = {torch.float32: "f32", torch.bfloat16: "bf16"}


@cache
def core() -> ov.Core:
    return ov.Core()


class CompiledGraph:
    """A graph that computes in the precision of `dtype`, with as many threads as torch has now. Not for two threads.

    When it meets other sizes than the last time, it prepares all its nodes anew, which can take as long as to run them
    (9 ms beside 15 for a block of eight of the default target), and with sizes left open it takes a third longer than
    with sizes that were known when it was compiled. So sizes that come again and again are run by instances that are
    their own, weights included, up to `spare` of them; then one takes the place of that not used for longest. With
    `growing`, axes by input that stay open, they are compiled for the other sizes, as long as that gives the same bits:
    operations may be joined otherwise and round less often (rotations of heads of eight channels do, of 64 do not), so
    each one shows first that its first results are also those of the graph for all sizes.
    """

    def __init__(
        self,
        model: ov.Model,
        dtype: torch.dtype,
        spare: int = 0,
        often: int = 1,
        growing: Mapping[int, int] | None = None,
    ) -> None:
        self._model, self._spare, self._often, self._growing = model, spare, often, growing or {}
        self._settings = {
            "INFERENCE_PRECISION_HINT": _HINTS[dtype],
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            "PERFORMANCE_HINT": "LATENCY",
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": GROUP,  # of what goes into products with int8 weights
            "NUM_STREAMS": 1,
            "ENABLE_CPU_PINNING": False,  # two processes would be pinned to the same cores
        }
        self._shared = _Instance(model, self._settings)
        self._own: dict[Hashable, _Instance] = {}  # by sizes, the last used last
        self._met: Counter[Hashable] = Counter()  # sizes without an instance

    def run(
        self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], sizes: Hashable = None, often: int | None = None
    ) -> None:
        """Compute `outputs`, contiguous tensors of the right shapes, from contiguous `inputs`. sizes: what their shapes
        hang on, if they are expected again; often: how many times until they have an instance."""
        instance = self._own.pop(sizes, None)
        if instance is None:
            self._shared.run(inputs, outputs)
            instance = self._for(sizes, often or self._often, inputs, outputs)
        else:
            instance.run(inputs, outputs)
        if instance is not None:
            self._own[sizes] = instance

    def _for(
        self, sizes: Hashable, often: int, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> _Instance | None:
        """An instance for the next time, if it pays to have one."""
        self._met[sizes] += 1
        if len(self._own) == self._spare:  # another would lose its own
            often = max(often, 4 * self._often)
        if sizes is None or not self._spare or self._met[sizes] < often:
            return None
        del self._met[sizes]
        if len(self._own) == self._spare:
            del self._own[next(iter(self._own))]
        if self._growing:
            made = _Instance(self._made_for(inputs), self._settings)
            again = [torch.empty_like(tensor) for tensor in outputs]
            made.run(inputs, again)
            if all(_same_bits(one, other) for one, other in zip(outputs, again, strict=True)):
                return made
            self._growing = {}
        return _Instance(self._model, self._settings)

    def _made_for(self, inputs: Sequence[Tensor]) -> ov.Model:
        shapes = {place: list(tensor.shape) for place, tensor in enumerate(inputs)}
        for place, axis in self._growing.items():
            shapes[place][axis] = -1
        model = self._model.clone()
        model.reshape(shapes)
        return model


class _Instance:
    def __init__(self, model: ov.Model, settings: Mapping[str, Any]) -> None:
        self._request = core().compile_model(model, "CPU", dict(settings)).create_infer_request()
        # where OpenVINO was told that each input lies. Only that is kept: an instance that waits for its sizes to come
        # again would hold a whole cache that is no longer used
        self._told: list[tuple[int, torch.Size] | None] = [None] * len(model.inputs)

    def run(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        for place, (tensor, told) in enumerate(zip(inputs, self._told, strict=True)):
            lies = tensor.data_ptr(), tensor.shape
            if lies != told:
                self._request.set_input_tensor(place, _shared(tensor))
                self._told[place] = lies
        for place, tensor in enumerate(outputs):
            self._request.set_output_tensor(place, _shared(tensor))
        self._request.infer()


def bucket(size: int, sizes: Sequence[int] = BUCKETS) -> int:
    """The next of few `sizes`, ascending, to which blocks are filled up; itself past the last."""
    return next((one for one in sizes if one >= size), size)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _shared(tensor: Tensor) -> ov.Tensor:
    if tensor.dtype == torch.bfloat16:  # which numpy has not
        return ov.Tensor(tensor.view(torch.int16).numpy(), list(tensor.shape), ov.Type.bf16)
    return ov.Tensor(tensor.numpy(), shared_memory=True)
