"""Small things on their way to the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def to_device(values: Any, device: torch.device) -> Tensor:
    """Numbers, as (nested) lists or in a host tensor, on the device, without waiting for the work queued there.

    `torch.tensor(…, device=…)` and an index that is a list wait for all of it on CUDA.
    """
    tensor = values if isinstance(values, Tensor) else torch.tensor(values)
    # CUDA has copied ordinary host memory before it returns, so the tensor may go
    return tensor.to(device, non_blocking=device.type == "cuda")
