"""What of a graph is computed in float32 where all else is computed in bfloat16, and how its weights are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import openvino as ov
import torch

from tercel.target_model.int8 import Int8Weights

_PRECISE = "precise_0"  # the attribute's name in OpenVINO; the plugin leaves such a node in the type it has
_LARGE = 4096  # numbers of a constant that is worth a conversion of its own


def prepared(model: ov.Model, dtype: torch.dtype, int8: Int8Weights | None = None) -> ov.Model:
    """The graph of a model of type `dtype`, changed in place: attention and rotary angles are float32's (an angle in
    bfloat16 is off by whole radians after some hundred tokens), weights are held in bfloat16 if that is what they are.
    int8: those that are held as whole numbers and scales.
    """
    if int8 is not None:
        _hold_whole(model, int8)
    if dtype == torch.bfloat16:
        for node in model.get_ordered_ops():
            kind = node.get_type_name()
            if kind in ("Sin", "Cos"):
                _mark(_above(node, lambda above: False))
            elif kind == "Exp" and _weighs_keys(node):
                _mark(_above(node, lambda above: above.get_type_name() == "MatMul"))
                _mark(_below(node, lambda below: below.get_type_name() == "Divide"))
        _halve_weights(model)
    return model


def _mark(nodes: Iterator[ov.Node]) -> None:
    for node in nodes:
        node.get_rt_info()[_PRECISE] = ""


def _weighs_keys(node: ov.Node) -> bool:
    """Whether this is the exponential of what attention subtracted the largest score from."""
    parent = node.input(0).get_source_output().get_node()
    if parent.get_type_name() != "Subtract":
        return False
    return parent.input(1).get_source_output().get_node().get_type_name() in ("ReduceMax", "Maximum")


def _above(node: ov.Node, last: Callable[[ov.Node], bool]) -> Iterator[ov.Node]:
    """`node` and all that it is computed from, up to the nodes that are `last`."""
    return _reached(node, last, lambda at: [port.get_source_output().get_node() for port in at.inputs()])


def _below(node: ov.Node, last: Callable[[ov.Node], bool]) -> Iterator[ov.Node]:
    """`node` and all that is computed from it, down to the nodes that are `last`."""
    return _reached(
        node, last, lambda at: [port.get_node() for out in at.outputs() for port in out.get_target_inputs()]
    )


def _reached(
    start: ov.Node, last: Callable[[ov.Node], bool], following: Callable[[ov.Node], list[ov.Node]]
) -> Iterator[ov.Node]:
    waiting, known = [start], {start.get_friendly_name()}
    while waiting:
        node = waiting.pop()
        if node.get_type_name() in ("Parameter", "Constant", "Result"):
            continue
        yield node
        if not last(node):
            new = [other for other in following(node) if other.get_friendly_name() not in known]
            known.update(other.get_friendly_name() for other in new)
            waiting += new


def _halve_weights(model: ov.Model) -> None:
    """Large constants that bfloat16 holds exactly become bfloat16: half the file, the same numbers."""
    for node in model.get_ordered_ops():
        if node.get_type_name() != "Constant" or node.get_element_type() != ov.Type.f32 or node.data.size < _LARGE:
            continue
        weights = torch.from_numpy(node.data.copy())
        half = weights.bfloat16()
        if torch.equal(half.float(), weights):
            held = ov.Tensor(ov.Type.bf16, list(half.shape))
            held.data.view("int16")[...] = half.view(torch.int16).numpy()
            again = ov.opset13.convert(ov.op.Constant(held), "f32")
            again.get_rt_info()["decompression_0"] = ""  # or it would be computed once and kept in float32
            _replace(node, again)
    model.validate_nodes_and_infer_types()


def _hold_whole(model: ov.Model, int8: Int8Weights) -> None:
    """Rounded matrices become whole numbers times scales, which is how OpenVINO's products know them."""
    for node in model.get_ordered_ops():
        if node.get_type_name() != "Constant" or node.get_element_type() != ov.Type.f32 or len(node.shape) != 2:
            continue
        found = int8.codes_of(torch.from_numpy(node.data.copy()))
        if found is not None:
            codes, scales = (ov.opset13.constant(part.numpy()) for part in found)
            _replace(node, ov.opset13.multiply(ov.opset13.convert(codes, "f32"), scales))
    model.validate_nodes_and_infer_types()


def _replace(node: ov.Node, other: ov.Node) -> None:
    for port in node.output(0).get_target_inputs():
        port.replace_source_output(other.output(0))
