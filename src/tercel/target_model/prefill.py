"""Prompts into rows of a cache: many at once, a chunk at a time, so that others can decode in between.

Prompts go in the order they are given. Like lengths run together, right-padded: a prompt never has to wait for the
end of a much longer one beside it, and little is computed for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from tercel.errors import TercelError
from tercel.target_model.output import TargetOutput, joined
from tercel.target_model.protocol import Blocks, RowCache
from tercel.target_model.transfer import to_device

CHUNK = 512  # tokens of a forward over prompts, padding included
PADDING = 1.5  # how many times its real tokens a chunk may hold


class Prefilling(Protocol):
    """The part of `TargetModel` that prompts need."""

    def prefill_chunk(
        self,
        remaining: Sequence[Sequence[int]],
        cache: RowCache,
        rows: Sequence[int],
        limit: int,
        capture: Sequence[int] = (),
    ) -> list[TargetOutput]: ...


class Prompt:
    """A prompt on its way into its row. Raises `TercelError` if it is empty."""

    def __init__(self, tokens: Sequence[int]) -> None:
        if not len(tokens):
            raise TercelError("an empty prompt gives the target nothing to go on; give at least one token")
        self.remaining = list(tokens)
        self._parts: list[TargetOutput] = []

    def take(self, part: TargetOutput) -> None:
        """The target's output over its next tokens."""
        self._parts.append(part)
        self.remaining = self.remaining[part.hidden.shape[1] :]

    @property
    def output(self) -> TargetOutput:
        """Over all of it so far, `[1, T, ..]`; held once."""
        self._parts = [joined(self._parts, 1)]
        return self._parts[0]


def run_chunk(
    target: Prefilling,
    prompts: Sequence[Prompt],
    cache: RowCache,
    rows: Sequence[int],
    limit: int = CHUNK,
    capture: Sequence[int] = (),
) -> int:
    """One chunk of at most `limit` tokens of the first prompts, each after what its row holds.

    Returns how many of the prompts, from the first on, are finished now: they finish in their order.
    """
    parts = target.prefill_chunk([prompt.remaining for prompt in prompts], cache, rows, limit, capture)
    for prompt, part in zip(prompts, parts, strict=False):
        prompt.take(part)
    return next((count for count, prompt in enumerate(prompts) if prompt.remaining), len(prompts))


def prefill(
    target: Prefilling,
    prompts: Sequence[Sequence[int]],
    cache: RowCache,
    rows: Sequence[int] | None = None,
    capture: Sequence[int] = (),
    chunk: int = CHUNK,
) -> list[TargetOutput]:
    """Run whole prompts, each after what its row holds, and commit them; returns `[1, T, ..]` a prompt.

    rows: of the cache; all of them if left out. capture: as in `TargetModel.forward`. chunk: most tokens of a forward.
    Raises `TercelError` for an empty prompt.
    """
    rows = range(len(cache.lengths)) if rows is None else rows
    waiting = runs = [Prompt(tokens) for tokens in prompts]
    while waiting:
        done = run_chunk(target, waiting, cache, rows, chunk, capture)
        waiting, rows = waiting[done:], rows[done:]
    return [run.output for run in runs]


def run_pieces(
    blocks: Blocks,
    remaining: Sequence[Sequence[int]],
    cache: RowCache,
    rows: Sequence[int],
    limit: int,
    capture: Sequence[int],
    device: torch.device,
) -> list[TargetOutput]:
    """`TargetModel.prefill_chunk` of a model that runs padded pieces of many prompts in one block."""
    count, width = plan_chunk([len(tokens) for tokens in remaining], limit)
    pieces = [tokens[:width] for tokens in remaining[:count]]
    there = to_device(right_padded(pieces, [cache.lengths[row] for row in rows[:count]]), device)
    out = blocks.forward(there[0], there[1], cache, None, capture, rows[:count])
    cache.keep([range(len(piece)) for piece in pieces])
    return [out.of_row(row, len(piece)) for row, piece in enumerate(pieces)]


def plan_chunk(remaining: Sequence[int], limit: int) -> tuple[int, int]:
    """How many of the first prompts, of so many tokens each, run together, and how many tokens of each at most.

    All of them end with that chunk, except a single one of more than `limit` tokens.
    """
    count, width, real = 1, min(remaining[0], limit), min(remaining[0], limit)
    for length in remaining[1:] if remaining[0] <= limit else ():
        padded = max(width, length) * (count + 1)
        if padded > limit or padded > PADDING * (real + length):
            break
        count, width, real = count + 1, max(width, length), real + length
    return count, width


def right_padded(pieces: Sequence[Sequence[int]], starts: Sequence[int]) -> Tensor:
    """Tokens and positions `[2, B, T]`, on the host, of pieces that begin at positions `starts`.

    Padding keeps the position of the last real token: there may be none after it.
    """
    width = max(map(len, pieces))
    packed = torch.zeros(2, len(pieces), width, dtype=torch.long)
    for row, (piece, start) in enumerate(zip(pieces, starts, strict=True)):
        packed[0, row, : len(piece)] = torch.tensor(piece)
        packed[1, row] = torch.arange(start, start + width).clamp(max=start + len(piece) - 1)
    return packed
