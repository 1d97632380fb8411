"""Attention masks for a block after a ragged cache.

Shape legend: B rows, T block length, S slots (`max(lengths) + T`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def causal_block(length: int, device: torch.device) -> Tensor:
    """`[1, T, T]` bool: token `i` of a block sees tokens `0..i` of it."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()[None]


def visible_slots(lengths: Sequence[int], block_mask: Tensor) -> Tensor:
    """Which slots each block token may attend to: every committed one of its row, and what `block_mask` allows after.

    `lengths`: committed tokens of each row; `block_mask` bool `[B, T, M]`: which of the `M` slots after
    the committed ones each of the `T` tokens sees (`M = T` for a block of its own; more where earlier blocks are
    still uncommitted). Returns bool `[B, T, max(lengths) + M]`.
    """
    rows, block, width = block_mask.shape
    shortest, longest = min(lengths), max(lengths)
    if shortest == longest:
        committed = block_mask.new_ones(1, 1, 1).expand(rows, block, longest)
        return torch.cat([committed, block_mask], dim=-1)
    seen = torch.zeros(rows, block, longest + width, dtype=torch.bool, device=block_mask.device)
    for row, length in enumerate(lengths):
        seen[row, :, :length] = True
        seen[row, :, length : length + width] = block_mask[row]
    return seen


def slot_positions(lengths: Sequence[int], positions: Tensor) -> Tensor:
    """Positions of the tokens in all slots: `s` for a committed one, `positions` `[B, T]` for the block's.

    Returns `[B, S]`.
    """
    rows, block = positions.shape
    out = torch.arange(max(lengths) + block, device=positions.device).repeat(rows, 1)
    for row, length in enumerate(lengths):
        out[row, length : length + block] = positions[row]
    return out


def within_window(positions: Tensor, slots: Tensor, window: int) -> Tensor:
    """Bool `[B, T, S]`: the slot's token is less than `window` positions before the block token."""
    return positions[:, :, None] - slots[:, None, :] < window


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Bool `[B, T, S]` to what attention adds to its scores: `[B, 1, T, S]`, 0 or `dtype`'s lowest number.

    Made once a forward: a bool mask would be converted again in every layer.
    """
    low = torch.finfo(dtype).min
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, low)[:, None]
