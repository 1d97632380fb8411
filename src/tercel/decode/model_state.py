"""The side of a second model that drafts: its cache, through its own target code, and its last output for every row.

The cache holds the committed tokens of each row's text, root included. A tree that grows is run as a block behind them,
anew for every level, and never committed: what is forgotten then costs nothing on any backend.

Shape legend: B rows, K nodes of a level, D of all levels so far, H hidden size, W draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tercel.target_model.kept import KeptTokens
from tercel.target_model.prefill import prefill
from tercel.target_model.protocol import RowCache, TargetModel
from tercel.target_model.transfer import to_device


class ModelState:
    """A model's drafts, level by level. vocabulary: the first `W` of its tokens that are drafted.

    output `[B, H]`: of each row's newest token.
    """

    def __init__(self, model: TargetModel, vocabulary: int) -> None:
        self.model, self.vocabulary = model, vocabulary
        self.cache: RowCache = model.new_cache(0, 0)
        self.output = torch.empty(0)
        self._tokens = self._positions = torch.empty(0)  # of the tree that grows, [B, D]
        self._seen = torch.empty(0)  # [B, D, D]

    def add_rows(self, count: int, capacity: int) -> None:
        self.cache.add_rows(count, capacity)
        new = torch.zeros(count, self.model.hidden_size, dtype=self.model.dtype, device=self.model.device)
        self.output = torch.cat([self.output, new]) if len(self.output) else new

    def resume(self, row: int, kept: Sequence[KeptTokens | None]) -> None:
        """Let a new row begin with what was kept of its first tokens, until something is missing."""
        there = list[KeptTokens]()
        for piece in kept:
            if piece is None:
                break
            there.append(piece)
        if there:
            self.cache.restore({row: there})

    def select_rows(self, rows: Sequence[int]) -> None:
        self.cache.select_rows(rows)
        self.output = self.output[to_device(list(rows), self.model.device).long()]

    @torch.no_grad()
    def catch_up(self, texts: Sequence[Sequence[int]]) -> None:
        """Take in what every row's text has become, where there is room for it."""
        self.model.renew(self.cache, texts)
        behind = [
            row
            for row, (text, known) in enumerate(zip(texts, self.cache.lengths, strict=True))
            if known < len(text) <= self.model.context_length
        ]
        if not behind:
            return
        most = self.model.vocab_size - 1  # a target with more may have said one that this model does not know
        new = [[min(token, most) for token in texts[row][self.cache.lengths[row] :]] for row in behind]
        last = torch.cat([part.hidden[0, -1:] for part in prefill(self.model, new, self.cache, behind)])
        self.output = self.output.index_copy(0, to_device(behind, self.model.device).long(), last)

    @torch.no_grad()
    def draft_level(self, tokens: Tensor, ancestors: Tensor, depth: int) -> Tensor:
        """Outputs `[B, K, H]` of drafted tokens `[B, K]` at `depth`; ancestors bool `[B, K, D]`: which of all tokens
        drafted so far each sees, this level's the last."""
        starts = to_device(self.cache.lengths, tokens.device)
        positions = (starts + depth - 1).clamp(max=self.model.context_length - 1)[:, None].expand_as(tokens)
        level, above = tokens.shape[1], 0 if depth == 1 else self._tokens.shape[1]
        if depth > 1:
            tokens, positions = torch.cat([self._tokens, tokens], 1), torch.cat([self._positions, positions], 1)
            ancestors = torch.cat([F.pad(self._seen, (0, level)), ancestors], 1)
        self._tokens, self._positions, self._seen = tokens, positions, ancestors
        rows = range(len(tokens))
        output = self.model.forward(tokens, positions.contiguous(), self.cache, ancestors.contiguous(), (), rows)
        return output.hidden[:, above:]

    def logits(self, output: Tensor) -> Tensor:
        """Outputs `[.., H]` to logits `[.., W]`, float32."""
        return self.model.logits(output)[..., : self.vocabulary].float()

    def best(self, output: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The likeliest tokens after outputs `[.., H]`, the likeliest first: logarithms of their probabilities, and the
        tokens, `[.., count]` each."""
        best, tokens = torch.log_softmax(self.logits(output), -1).topk(min(count, self.vocabulary))
        return best, tokens
