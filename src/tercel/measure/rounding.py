"""How much rounding alone moves a target's logits: the same tokens, run in several shapes (spec section 9).

Shape legend: S shapes, P positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tercel.target.model import Target

POSITIONS = 8  # the rounding at one position alone is too small a sample of what it can be
CANDIDATES = 16  # tokens whose logits matter for a near tie
BLOCKS = (2, 5, 16, 33)  # lengths of the blocks that drafted decoding might have run


@dataclass(frozen=True)
class Shapes:
    """The target's logits after the last P positions of one sequence, float32 `[S, P, V]`, in S shapes of forward.

    Shape 0 is one token after another behind a cache, as token-by-token decoding runs it.
    """

    logits: Tensor

    @property
    def last(self) -> Tensor:
        """`[S, V]`: the next token's logits."""
        return self.logits[:, -1]

    def gap_noise(self) -> float:
        """The largest difference between shapes in how far apart two probable tokens' logits are, at any of the P
        positions."""
        top = self.logits[0].topk(min(CANDIDATES, self.logits.shape[-1]), -1).indices  # [P, C], best first
        picked = self.logits.gather(-1, top.expand(len(self.logits), -1, -1))  # [S, P, C]
        gaps = picked[..., :1] - picked
        return float((gaps[:, None] - gaps[None]).abs().max())


def run_shapes(target: Target, prompt: Sequence[int], answer: Sequence[int]) -> Shapes:
    """Run `prompt + answer` without a cache, token by token, in blocks of several lengths, and as the root of a
    tree; each after the prompt's own prefill, as decoding has it."""
    rows = [_in_blocks(target, prompt, answer, 1)]
    tokens = torch.tensor([[*prompt, *answer]], device=target.device)
    rows.append(target.encode(tokens).hidden[0, -POSITIONS:])
    rows += [_in_blocks(target, prompt, answer, length) for length in BLOCKS]
    kept = min(len(row) for row in rows)
    last = target.logits(_as_root(target, [*prompt, *answer])).float()
    logits = [target.logits(row[-kept:]).float() for row in rows]
    logits.append(torch.cat([logits[0][:-1], last[None]]))
    return Shapes(torch.stack(logits))


def _in_blocks(target: Target, prompt: Sequence[int], answer: Sequence[int], length: int) -> Tensor:
    """Hidden states `[P, K]` of the last positions: prefill, then blocks of `length` tokens."""
    cache = target.new_cache(1, len(prompt) + len(answer))
    hidden = target.prefill(prompt, cache).hidden[0]
    parts = [hidden[-POSITIONS:]]
    for start in range(0, len(answer), length):
        parts.append(target.prefill(answer[start : start + length], cache).hidden[0])
    return torch.cat(parts)[-POSITIONS:]


def _as_root(target: Target, tokens: Sequence[int]) -> Tensor:
    """Hidden state `[K]` of the last token as the root of a tree of `BLOCKS[-1]` nodes, all others its children."""
    nodes, device = BLOCKS[-1], target.device
    cache = target.new_cache(1, len(tokens) + nodes)
    if len(tokens) > 1:
        target.prefill(tokens[:-1], cache)
    children = torch.arange(nodes - 1) % target.vocab_size
    block = torch.cat([torch.tensor([tokens[-1]]), children])[None].to(device)
    depths = torch.ones(1, nodes, dtype=torch.long, device=device)
    depths[0, 0] = 0
    within = torch.eye(nodes, dtype=torch.bool, device=device)
    within[:, 0] = True
    return target.forward(block, depths + len(tokens) - 1, cache, within[None]).hidden[0, 0]
