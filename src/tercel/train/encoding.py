"""Chats through the frozen target: what training needs of each, from blocks of like lengths.

Shape legend: T tokens of a chat, U of them before a supervised token; n layers, K target's hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tercel.chat.conversation import TokenizedChat
from tercel.draft.alignment import deciding
from tercel.target_model.output import TargetOutput
from tercel.target_model.protocol import TargetModel

PADDING_WASTE = 1.15


@dataclass(frozen=True)
class Encoded:
    """One chat: features `[T, n*K]`, and last hidden states `[U, K]` of the positions before a supervised token."""

    features: Tensor
    hidden: Tensor


def before_supervised(chat: TokenizedChat) -> Tensor:
    """Bool `[T]`: the positions whose logits predict a supervised token."""
    before = torch.zeros(len(chat.tokens), dtype=torch.bool)
    positions = deciding(torch.nonzero(torch.from_numpy(chat.supervised))[:, 0])
    before[positions[positions >= 0]] = True  # nothing decides the first token
    return before


def padded(chats: Sequence[TokenizedChat]) -> Tensor:
    """Long `[B, T]`: their tokens, padded on the right."""
    block = torch.zeros(len(chats), max(len(chat) for chat in chats), dtype=torch.long)
    for number, chat in enumerate(chats):
        block[number, : len(chat)] = torch.from_numpy(chat.tokens)
    return block


def apart(output: TargetOutput, chats: Sequence[TokenizedChat]) -> list[Encoded]:
    """What a block of `padded` chats gave, chat by chat."""
    features, device = output.features, output.hidden.device
    return [
        Encoded(
            features[number, : len(chat)].contiguous(),
            output.hidden[number, torch.nonzero(before_supervised(chat))[:, 0].to(device)],
        )
        for number, chat in enumerate(chats)
    ]


def encode_group(target: TargetModel, layers: Sequence[int], chats: Sequence[TokenizedChat]) -> list[Encoded]:
    """All of them in one block."""
    return apart(target.encode(padded(chats).to(target.device), layers), chats)


def padding_groups(lengths: Sequence[int], most: int | None = None) -> list[list[int]]:
    """Group indices of like lengths, so that right-padding wastes little; most: tokens of a group, padding included,
    where it has more than one member."""
    groups: list[list[int]] = []
    total = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if groups:
            padded = lengths[groups[-1][0]] * (len(groups[-1]) + 1)
            if padded <= PADDING_WASTE * (total + lengths[index]) and (most is None or padded <= most):
                groups[-1].append(index)
                total += lengths[index]
                continue
        groups.append([index])
        total = lengths[index]
    return groups
