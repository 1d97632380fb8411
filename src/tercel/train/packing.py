"""How rows of hidden states are kept on the disk: in bfloat16, or in 8 bits with a scale a row and layer.

Shape legend: R rows, n layers side by side in a row, K hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_SCALE = torch.float32


@dataclass(frozen=True)
class Packing:
    """dtype: of the numbers; most: the largest that it holds, to which a row's largest is scaled (None: no scale)."""

    dtype: torch.dtype
    most: float | None

    @property
    def parts(self) -> tuple[str, ...]:
        """What the tensors' names end in."""
        return ("",) if self.most is None else ("", ".scale")

    def bytes_of(self, layers: int, width: int) -> int:
        """Of a row."""
        return layers * (width * self.dtype.itemsize + (0 if self.most is None else _SCALE.itemsize))

    def pack(self, rows: Tensor, layers: int) -> list[Tensor]:
        """Numbers `[R, n*K]`, and where there is a scale, scales `[R, n]`, of rows `[R, n*K]`."""
        if self.most is None:
            return [rows.to(self.dtype)]
        apart = rows.float().unflatten(1, (layers, -1))
        scale = (apart.abs().amax(-1, keepdim=True) / self.most).clamp(min=torch.finfo(_SCALE).tiny)
        scaled = apart / scale
        if not self.dtype.is_floating_point:
            scaled = scaled.round()
        return [scaled.to(self.dtype).flatten(1), scale.squeeze(-1)]

    def unpack(self, parts: Sequence[Tensor], width: int, dtype: torch.dtype) -> Tensor:
        """The rows `[R, n*K]` again, in `dtype`."""
        if self.most is None:
            return parts[0].to(dtype)
        numbers, scale = parts
        return (numbers.float().unflatten(1, (-1, width)) * scale[..., None]).flatten(1).to(dtype)


PACKINGS = {
    "bf16": Packing(torch.bfloat16, None),
    "float8": Packing(torch.float8_e4m3fn, torch.finfo(torch.float8_e4m3fn).max),
    "int8": Packing(torch.int8, 127.0),
}
