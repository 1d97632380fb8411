"""The side of a head that drafts step by step: its cache and its last output, for every row (spec section 8).

The cache holds one entry for every committed token but the first: slot `t` is row `t` (feature `f_t`, token `x[t+1]`)
at head position `t`, or a later row and position where entries before it were forgotten (`HeadWindow`). Entries of
committed tokens always come from the target's true features; those of drafted nodes lie after them while a tree grows
and are overwritten afterwards.

Shape legend: B rows, K top-k, H head's hidden size, W draft vocabulary, S slots, q/kv heads, D head size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tercel.draft import LayerHead, StepHead
from tercel.draft.alignment import head_position, rope_position, token_in
from tercel.draft.layers import Projected
from tercel.target_model.attention import attend
from tercel.target_model.cache import TargetCache
from tercel.target_model.masks import additive, visible_slots
from tercel.target_model.prefill import CHUNK, plan_chunk
from tercel.target_model.protocol import RowCache, TargetModel
from tercel.target_model.transfer import to_device


@dataclass(frozen=True)
class HeadWindow:
    """What a head attends to behind a long context: the `first` entries and the newest, `last` at least and up to twice
    as many; those in between are forgotten, so that neither a draft's cost nor its memory grows further."""

    first: int = 4
    last: int = 256

    def excess(self, length: int) -> int:
        """How many entries after the first ones to forget of so many."""
        return length - self.first - self.last if length > self.first + 2 * self.last else 0


class EntryCache(RowCache, Protocol):
    """forgotten: committed entries of each row that it holds no more; positions go on."""

    forgotten: list[int]

    def forget(self, row: int, first: int, count: int) -> None:
        """Let go of `count` committed entries of a row, behind the first ones; those after them move up."""
        ...


class HeadState(ABC):
    """The head's side of every row: its cache and its last output. How a step is computed is a subclass's matter.

    output `[B, H]`: of each row's newest entry, which predicts the root's children. window: None for all entries.
    """

    cache: EntryCache
    resumes = True  # whether a row can go on from entries alone

    def __init__(self, head: StepHead, target: TargetModel, window: HeadWindow | None = None) -> None:
        self.head, self.target, self.window = head, target, window
        self.positions = head.config.max_position_embeddings
        self.output = torch.empty(0)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.head.embed_tokens(tokens) if self.head.config.own_embeddings else self.target.embed(tokens)

    def put(self, rows: Sequence[int], output: Tensor) -> None:
        """`output` `[b, H]` is that of these rows' newest entries; a row that has none yet has zeros."""
        if list(rows) == list(range(len(self.cache.lengths))):
            self.output = output
            return
        place = to_device(list(rows), self.target.device).long()
        self.output = self._of_all(output[:0]).index_copy(0, place, output)

    def select_rows(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""
        if len(self.output):
            self.output = self._of_all(self.output)[to_device(list(rows), self.target.device).long()]
        self.cache.select_rows(rows)

    def _of_all(self, like: Tensor) -> Tensor:
        known = self.output if len(self.output) else like
        return torch.cat([known, like.new_zeros(len(self.cache.lengths) - len(known), *like.shape[1:])])

    @abstractmethod
    def extend(
        self, features: Sequence[Sequence[Tensor]], entries: Sequence[Sequence[int]], rows: Sequence[int] | None = None
    ) -> Tensor:
        """Write entries of committed tokens into `rows` (all, if left out): a row's true features `[t, Ht]` a layer,
        and the `t` tokens after them. Returns the output `[B, H]` of each row's last."""

    def fill(
        self, features: Sequence[Sequence[Tensor]], entries: Sequence[Sequence[int]], rows: Sequence[int]
    ) -> Tensor:
        """`extend` with whole prompts: in chunks as the target runs them, so that what they take for a while does not
        grow with their lengths, and none is padded to one much longer."""
        outputs, place, done = [], 0, 0  # `done` entries of the prompt at `place`
        while place < len(entries):
            left = [len(entries[place]) - done, *map(len, entries[place + 1 :])]
            count, width = plan_chunk(left, CHUNK)
            part, chunk = slice(place, place + count), slice(done, done + width)
            own = [[layer[chunk] for layer in layers] for layers in features[part]]
            output = self.extend(own, [tokens[chunk] for tokens in entries[part]], rows[part])
            done = done + width if left[0] > width else 0
            if not done:
                outputs.append(output)
                place += count
        return torch.cat(outputs)

    @abstractmethod
    def draft_level(self, tokens: Tensor, hidden: Tensor, ancestors: Tensor, depth: int) -> Tensor:
        """Entries for drafted nodes `[B, K]` at `depth`, `hidden` `[B, K, H]` from their parents, `ancestors` bool
        `[B, K, D]`: which of all nodes drafted so far each sees, this level's the last. Returns their outputs
        `[B, K, H]`."""

    def best(self, output: Tensor, count: int, depth: int) -> tuple[Tensor, Tensor]:
        """What is likeliest at `depth`, after outputs `[.., H]`: `count` drafts or as many as there are, the likeliest
        first: logarithms of the draft's probabilities, and places in its vocabulary, `[.., count]` each."""
        return likeliest(self._logits(output), count)

    def _known(self, positions: Tensor) -> Tensor:
        """Entries past the head's last position keep that one: nothing is drafted from them."""
        return positions.clamp(max=self.positions - 1)

    def _written_at(self, rows: Sequence[int] | None, block: Tensor) -> Tensor:
        """Positions `[B, T]` of the next entries of `rows`, of which `block` `[T]` counts."""
        written = self._positions(rows)[:, None] + block  # the entries' rows
        return self._known(head_position(token_in(written, 0)))

    def _drafted_at(self, depth: int) -> Tensor:
        """The position `[B]` of entries drafted at `depth`."""
        newest = self._positions(None) - 1  # the row that drafts, whose step `depth` this is
        return self._known(rope_position(newest, depth))

    def _packed(
        self, features: Sequence[Sequence[Tensor]], entries: Sequence[Sequence[int]]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Features `[B, T, n*Ht]` and tokens `[B, T]` of rows as long as the longest, and where each ends, `[B, 1]`."""
        length = max(map(len, entries))
        packed = to_device([[len(row), *row, *[0] * (length - len(row))] for row in entries], self.target.device)
        padded = pad_sequence([torch.cat(tuple(own), -1) for own in features], batch_first=True)
        return padded, packed[:, 1:], packed[:, :1] - 1

    def _keep(self, entries: Sequence[Sequence[int]], rows: Sequence[int] | None) -> None:
        """Make the entries just written permanent, and forget what the window leaves out."""
        self.cache.keep([range(len(row)) for row in entries])
        if self.window is not None:
            for place in range(len(self.cache.lengths)) if rows is None else rows:
                if excess := self.window.excess(self.cache.lengths[place]):
                    self.cache.forget(place, self.window.first, excess)

    @abstractmethod
    def _positions(self, rows: Sequence[int] | None) -> Tensor:
        """Of the next entry of each of `rows`, or of all, long `[B]`: how many were committed, forgotten ones too."""

    @abstractmethod
    def _logits(self, output: Tensor) -> Tensor:
        """`StepHead.logits`, in float32."""


class AttendedState(HeadState):
    """Of a head whose attention is computed here, between `project` and `finish`; by what, a subclass knows."""

    head: LayerHead

    def extend(
        self, features: Sequence[Sequence[Tensor]], entries: Sequence[Sequence[int]], rows: Sequence[int] | None = None
    ) -> Tensor:
        """As it says there. Only the last entry of each row needs a query, since the others are never drafted from;
        but where a layer reads another's outputs, they make its keys."""
        padded, tokens, last = self._packed(features, entries)
        block = torch.arange(tokens.shape[1], device=tokens.device)
        positions, hidden = self._written_at(rows, block), self._fuse(padded)
        asked = block.expand(len(tokens), -1) if self.head.deeper else last
        seen = block <= asked[..., None]
        output = self._write(self.embed(tokens), hidden, positions, seen, asked, rows)
        self._keep(entries, rows)
        every = torch.arange(len(tokens), device=tokens.device)
        return output[every, last[:, 0]] if self.head.deeper else output[:, 0]

    def draft_level(self, tokens: Tensor, hidden: Tensor, ancestors: Tensor, depth: int) -> Tensor:
        """As it says there."""
        rows, width = tokens.shape
        positions = self._drafted_at(depth)[:, None].expand(-1, width)
        every = torch.arange(width, device=tokens.device).expand(rows, -1)
        return self._write(self.embed(tokens), hidden, positions, ancestors, every, None)

    @abstractmethod
    def _fuse(self, features: Tensor) -> Tensor:
        """`StepHead.fuse`."""

    @abstractmethod
    def _write(
        self,
        embedding: Tensor,
        hidden: Tensor,
        positions: Tensor,
        ancestors: Tensor,
        asked: Tensor,
        rows: Sequence[int] | None,
    ) -> Tensor:
        """New entries after those of `rows`: embedding, hidden `[B, T, H]`, positions `[B, T]`.

        asked `[B, Q]`: which of them are to give an output, in their order all of them where the head has deeper
        layers; ancestors bool `[B, Q, U + T]`: which of the `U` that were drafted before and of the new ones each of
        those sees, beside all committed. Returns the outputs `[B, Q, H]`.
        """


class TorchHeadState(AttendedState):
    """Computed by the head's own modules."""

    def __init__(self, head: LayerHead, target: TargetModel, window: HeadWindow | None = None) -> None:
        super().__init__(head, target, window)
        self.cache: TargetCache = TargetCache(0, 0)

    def _positions(self, rows: Sequence[int] | None) -> Tensor:
        return self.cache.positions(self.target.device, rows)

    def _fuse(self, features: Tensor) -> Tensor:
        return self.head.fuse(features)

    def _logits(self, output: Tensor) -> Tensor:
        return self.head.logits(output).float()

    def _write(
        self,
        embedding: Tensor,
        hidden: Tensor,
        positions: Tensor,
        ancestors: Tensor,
        asked: Tensor,
        rows: Sequence[int] | None,
    ) -> Tensor:
        cache, width = self.cache, embedding.shape[1]
        lengths = cache.lengths if rows is None else [cache.lengths[row] for row in rows]
        seen = visible_slots(lengths, ancestors)

        def attended(layer: int, now: Projected) -> tuple[Tensor, Tensor]:
            keys, values = cache.update(now.key.transpose(1, 2), now.value.transpose(1, 2), layer)
            query, residual = now.query, now.residual
            if asked.shape[1] < width:
                every = torch.arange(len(asked), device=asked.device)[:, None]
                query, residual = query[every, asked], residual[every, asked]
            return residual, _attend(query, keys, values, seen)

        now = self.head.project(embedding, hidden, positions)
        cache.begin(width, embedding.device, rows, uncommitted=ancestors.shape[-1] - width)
        return self.head.step(now, positions, attended)


def likeliest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of logits `[.., W]`, or as many as there are, the largest first: logarithms of their
    probabilities, and their places, `[.., count]` each."""
    best, places = logits.topk(min(count, logits.shape[-1]))
    most = best[..., :1]  # `log_softmax` of all of them would be written out, and takes twice as long
    return best - most - (logits - most).exp_().sum(-1, keepdim=True).log_(), places


def _attend(query: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> Tensor:
    """query `[B, T, q, D]`, keys/values `[B, kv, S, D]`, seen bool `[B, T, S]` → `[B, T, q*D]`."""
    return attend(query.transpose(1, 2), keys, values, additive(seen, query.dtype)).flatten(2)
