"""Rows added to a block so that every matrix product takes the same kernel, whatever the block's width, or so that
there are fewer widths.

A product of many rows computes each of them alike; of very few rows, libraries use other kernels, which sum in another
order (one row in bfloat16; one to three in float32, where a thread's share of the rows counts).

Shape legend: B rows, T block length.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

WIDEST = 3  # tokens that are added to a row at most


def missing(rows: int, width: int, dtype: torch.dtype) -> int:
    """How many tokens each of `rows` rows of `width` tokens lacks."""
    if dtype != torch.float32:
        return 1 if rows * width == 1 else 0
    return next(extra for extra in range(4) if rows * (width + extra) % 4 == 0)


def padded_block(tokens: Tensor, positions: Tensor, block_mask: Tensor, extra: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens and positions `[B, T + extra]` and mask `[B, T + extra, T + extra]`: what is added stands at the position
    of the row's first token, sees only itself and is seen by no other."""
    if not extra:
        return tokens, positions, block_mask
    more = torch.eye(tokens.shape[1] + extra, dtype=torch.bool, device=block_mask.device)
    more[: tokens.shape[1]] = False
    return (
        F.pad(tokens, (0, extra)),
        torch.cat([positions, positions[:, :1].expand(-1, extra)], 1),
        F.pad(block_mask, (0, extra, 0, extra)) | more,
    )
