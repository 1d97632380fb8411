"""What computes a target: transformers with torch, or graphs of another library that give the same.

The reference is always loaded: it knows the model's sizes, encodes whole sequences, and is what another backend is
checked against before it computes anything.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

from tercel.errors import TercelError
from tercel.memory import available_memory
from tercel.target_model.backend_names import AUTO, BACKENDS, OPENVINO, TORCH
from tercel.target_model.experts import has_experts
from tercel.target_model.model import Target
from tercel.target_model.structure import default_feature_layers

PROBE_LENGTH = 32  # more than what `check_against` runs
SMALL = 20_000_000  # parameters; below, a graph takes longer to build than it saves in many answers
BUILDING = 12  # bytes a parameter: a copy in float32, the graph's weights, and what they are packed into
_MISSING = "the package openvino is not installed; install it with: pip install 'tercel[openvino]'"


def load_target(
    name: str, *, backend: str = AUTO, say: Callable[[str], None] = lambda note: None, **how: Any
) -> Target:
    """`Target.load`, and `with_backend` for it. how: as `Target.load` takes it.

    Raises `TercelError` as the two do.
    """
    return with_backend(Target.load(name, **how), backend, say=say)


def with_backend(
    target: Target, backend: str, *, keep: bool = True, say: Callable[[str], None] = lambda note: None
) -> Target:
    """The same target, computed by one of `BACKENDS`; by torch where that cannot compute it, or not as torch does.

    "auto" is openvino on a CPU where it is installed and the model is large enough for its forwards to take longer than
    what is around them, else torch.
    keep: whether what is built for it stays in the package's cache. say: told what takes long, and why it is torch
    after all. Raises `TercelError` for a backend that there is not, or that is not installed.
    """
    if backend not in BACKENDS:
        raise TercelError(f"there is no backend {backend}; known are {', '.join(BACKENDS)}")
    missing = find_spec(OPENVINO) is None
    if backend == TORCH or (backend == AUTO and (missing or not _pays(target))):
        return target
    if missing:
        raise TercelError(_MISSING)
    try:
        return _on_openvino(target, keep, say)
    except TercelError as error:
        say(f"{target.source.name} is computed by torch: {error}")
        return target


def _pays(target: Target) -> bool:
    """Whether a graph is worth building unasked: nobody is told of a model for which there can be none."""
    return _parameters(target) >= SMALL and _why_not(target) is None


def _parameters(target: Target) -> int:
    return sum(parameter.numel() for parameter in target.model.parameters())


def _on_openvino(reference: Target, keep: bool, say: Callable[[str], None]) -> Target:
    """Raises `TercelError` if its graphs cannot be made, or do not give what the reference gives."""
    from tercel.target_model.openvino.blocks import OpenVinoBlocks, OpenVinoOutput
    from tercel.target_model.openvino.check import check_against, rounds_activations

    why_not = _why_not(reference)
    if why_not is not None:
        raise TercelError(why_not)
    # with those that most heads read from the beginning, so that one graph serves with and without drafts
    layers = default_feature_layers(reference.num_layers) if reference.num_layers > 2 else ()
    blocks = OpenVinoBlocks(reference, layers, keep, say)
    other = reference.computed_by(blocks, OpenVinoOutput(reference, keep, say))
    if reference.int8 is not None:
        other.rounds_activations = rounds_activations(reference, other, reference.int8)
    check_against(reference, other, layers)
    return other


def _why_not(target: Target) -> str | None:
    """Why no graph can be made of it, or none that could be checked; None if one can."""
    if target.device.type != "cpu":
        return f"the backend openvino runs on the CPU, not on {target.device}"
    if target.dtype not in (torch.float32, torch.bfloat16):
        name = str(target.dtype).removeprefix("torch.")
        return f"the backend openvino computes float32 and bfloat16, not {name}"
    if not target.tree_support.tree:
        return f"the backend openvino needs a model that can verify a tree: {target.tree_support.reason}"
    if has_experts(target.config):
        return "the backend openvino has no graph for experts, of which every token takes others"
    if target.context_length < PROBE_LENGTH:
        return f"a context of {target.context_length} tokens is too short to check the backend openvino in"
    if target.stock.rope is not None:
        return "the backend openvino has no RoPE that depends on the length of a sequence"
    needed, left = BUILDING * _parameters(target), available_memory(target.device)
    if left is not None and left < needed:
        return (
            f"building the graphs of the backend openvino takes {needed / 2**30:.1f} GiB, of which "
            f"{left / 2**30:.1f} are left"
        )
    return None
