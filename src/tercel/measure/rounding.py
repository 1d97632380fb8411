"""How much rounding alone moves a target's logits: the same tokens, run in several shapes (spec section 9).

Everything here runs the stock model with the stock cache and masks. Measured with the project's own blocks
and trees, a fault of theirs would count as noise and excuse itself.

Shape legend: S shapes, P positions, K hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache

from tercel.target_model.model import Target

POSITIONS = 8  # the rounding at one position alone is too small a sample of what it can be
CANDIDATES = 16  # tokens whose logits matter for a near tie
BLOCKS = (1, 2, 5, 16, 33)  # lengths of the blocks that an answer is run in; 1 is token-by-token decoding
ROWS = 3  # of a batch, with padding, so that the mask is a tensor and the products have other sizes


@dataclass(frozen=True)
class Shapes:
    """The target's logits after the last P positions of one sequence, float32 `[S, P, V]`, in S shapes of
    forward; shape 0 is token-by-token decoding."""

    logits: Tensor

    @property
    def last(self) -> Tensor:
        """`[S, V]`: the next token's logits."""
        return self.logits[:, -1]

    def gap_noise(self) -> float:
        """The largest difference between shapes in how far apart two probable tokens' logits are, at any of
        the P positions."""
        top = self.logits[0].topk(min(CANDIDATES, self.logits.shape[-1]), -1).indices  # [P, C], best first
        picked = self.logits.gather(-1, top.expand(len(self.logits), -1, -1))  # [S, P, C]
        gaps = picked[..., :1] - picked
        return float((gaps[:, None] - gaps[None]).abs().max())


@torch.no_grad()
def run_shapes(target: Target, prompt: Sequence[int], answer: Sequence[int]) -> Shapes:
    """Run `prompt + answer` in blocks after the prompt's own prefill, whole, and as a row of a padded
    batch."""
    with target.stock.sequences_of(len(prompt) + len(answer)):
        rows = list(_runs(target, prompt, answer))
    kept = min(POSITIONS, *(len(row) for row in rows))
    return Shapes(torch.stack([target.logits(row[-kept:]).float() for row in rows]))


def _runs(target: Target, prompt: Sequence[int], answer: Sequence[int]) -> Iterator[Tensor]:
    """Hidden states `[P.., K]` up to the last position."""
    for length in BLOCKS:
        yield _in_blocks(target, prompt, answer, length)
    whole = torch.tensor([[*prompt, *answer]], device=target.device)
    yield target.stock.decoder(input_ids=whole, use_cache=False).last_hidden_state[0]
    padded = torch.cat([whole, whole.new_zeros(1, 1)], dim=1).repeat(ROWS, 1)
    mask = torch.ones_like(padded)
    mask[:, -1] = 0
    mask[1:, -2:] = 0
    states = target.stock.decoder(input_ids=padded, attention_mask=mask, use_cache=False).last_hidden_state
    yield states[0, :-1]


def _in_blocks(target: Target, prompt: Sequence[int], answer: Sequence[int], length: int) -> Tensor:
    cache = DynamicCache(config=target.config)
    blocks = [prompt, *(answer[start : start + length] for start in range(0, len(answer), length))]
    states = []
    for block in blocks:
        tokens = torch.tensor([list(block)], device=target.device)
        out = target.stock.decoder(input_ids=tokens, cache=cache, use_cache=True)
        states.append(out.last_hidden_state[0, -POSITIONS:])
    return torch.cat(states)
