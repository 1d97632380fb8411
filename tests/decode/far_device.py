"""A pretended accelerator: what CUDA and MPS would refuse, or wait for, is refused or counted on a machine without.

Its tensors hold their numbers on the CPU but say that they lie elsewhere (the label is torch's "meta"). Mixing them
with host tensors is an error, so is float64, and every number that travels is counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tercel.draft import DraftModel
from tercel.target_model.model import Target

FAR = torch.device("meta")
aten = torch.ops.aten
# whose result has a size that only the numbers tell, so that the host has to wait for it
WAITING = {aten.nonzero.default, aten.masked_select.default, aten._unique2.default, aten.unique_dim.default}


class FarTensor(Tensor):
    """A tensor of the pretended device."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> FarTensor:
        assert inner.dtype != torch.float64, "float64 on the device: Apple's have none"
        strides, offset = inner.stride(), inner.storage_offset()
        far = Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=strides, storage_offset=offset, dtype=inner.dtype, device=FAR
        )
        far.inner = inner
        return far

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} outside the pretended device")


class FarDevice(TorchDispatchMode):
    """up: copies to the device; down: copies from it and waits for numbers that lie there."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.log: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        far = any(isinstance(tensor, FarTensor) for tensor in tensors)
        made_past = [t for t in tensors if t.device == FAR and not isinstance(t, FarTensor)]
        assert not made_past, f"{func}: a tensor was made on the device from host numbers, which waits; use to_device"
        device = kwargs.get("device")
        to_far = far if device is None else torch.device(device) == FAR
        if func is aten._to_copy.default and to_far != far:
            self._count("up" if to_far else "down", func, args[0])
        elif far:
            mixed = [t for t in tensors if not isinstance(t, FarTensor) and t.ndim]
            assert not mixed or func is aten.copy_.default, f"{func} mixes tensors of the host and of the device"
            if func is aten.copy_.default and mixed:
                self._count("up" if isinstance(args[0], FarTensor) else "down", func, args[1])
            if func is aten._local_scalar_dense.default or func in WAITING or self._selects(func, args):
                self._count("down", func, args[0])
        if device is not None:
            kwargs = {**kwargs, "device": "cpu"}
        near_args, near_kwargs = tree_map(_near, (args, kwargs))
        out = func(*near_args, **near_kwargs)
        if func._schema.name.endswith("_") and isinstance(args[0], FarTensor):
            if torch.Tag.inplace_view in func.tags:  # the wrapper has a shape of its own
                with no_dispatch():
                    func(*args, **kwargs)
            return args[0]
        return tree_map(lambda value: FarTensor(value) if to_far and isinstance(value, Tensor) else value, out)

    @staticmethod
    def _selects(func: Any, args: Any) -> bool:
        """Indexing by a mask."""
        indices = args[1] if func in (aten.index.Tensor, aten.index_put_.default) else ()
        return any(index is not None and index.dtype == torch.bool for index in indices)

    def _count(self, way: str, func: Any, what: Tensor) -> None:
        self.counts[way] += 1
        self.counts[f"{way} numbers"] += what.numel()
        self.log.append(f"{way} {func} {tuple(what.shape)}")


def _near(value: Any) -> Any:
    return value.inner if isinstance(value, FarTensor) else value


def move(module: nn.Module) -> None:
    """Lay a module's parameters and buffers on the device."""
    for part in module.modules():
        for held in (part._parameters, part._buffers):
            for name, value in held.items():
                if value is not None:
                    held[name] = FarTensor(value.detach())  # type: ignore[assignment]


@contextmanager
def on_far_device(target: Target, draft: DraftModel) -> Iterator[FarDevice]:
    """Run with target and head there."""
    with torch.no_grad(), FarDevice() as device:
        move(target.model)
        move(draft.head)
        yield device
