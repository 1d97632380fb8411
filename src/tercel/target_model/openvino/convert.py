"""A torch module as an OpenVINO graph."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import openvino as ov
import torch
from torch import Tensor, nn

from tercel.errors import TercelError
from tercel.target_model.int8 import Int8Weights
from tercel.target_model.openvino.precision import prepared

_TYPES = {
    torch.float32: ov.Type.f32,
    torch.bfloat16: ov.Type.bf16,
    torch.int64: ov.Type.i64,
    torch.bool: ov.Type.boolean,
}


def converted(
    module: nn.Module, example: Sequence[Tensor], shapes: Sequence[Sequence[int]], int8: Int8Weights | None = None
) -> ov.Model:
    """`module`, as it treats inputs of the types of `example` and of any `shapes` (-1: any size), ready to compile.

    In the example no two sizes should be alike that are not always so. int8: which of its matrices are whole numbers.
    Raises `TercelError` if the graph does not take
    all of these inputs, and whatever torch or OpenVINO raise for a module that they cannot follow.
    """
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of every size that is taken for a constant
        # what tracing checks, whether the same comes out of a second trace, is less than what a graph is checked for
        traced = torch.jit.trace(module, tuple(example), strict=False, check_trace=False)
        model = ov.convert_model(traced, example_input=tuple(example))
    if [port.element_type for port in model.inputs] != [_TYPES[tensor.dtype] for tensor in example]:
        raise TercelError("its graph does not take all inputs")
    model.reshape({port: ov.PartialShape(list(shape)) for port, shape in zip(model.inputs, shapes, strict=True)})
    return prepared(model, next(tensor.dtype for tensor in example if tensor.is_floating_point()), int8)
