"""SuffixDecoding (arXiv 2411.04975): what followed the end of the text wherever it stood before, in this request or in
past answers, weighed by how often.

A node of a suffix tree is the set of places where a piece of text ended. Here these sets are made when they are asked
for, out of an index of short n-grams: a node costs nothing before it is drafted, and past answers can be forgotten.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from tercel.decode.draft_tree import DraftTree
from tercel.decode.proposer import Proposer, Row
from tercel.decode.proposers import SUFFIX, Parts, ProposerKind
from tercel.decode.types import Proposal
from tercel.draft.shape import TreeShape
from tercel.errors import TercelError
from tercel.target_model.output import TargetOutput

LARGEST = TreeShape(10, 24, 64)
FACTOR, LEAST = 1.0, 0.1
PAST = 1 << 16  # tokens of past answers that are kept: the newest
PATTERN = 64  # longest end of the text that is looked for
KEY = 3  # longest n-gram of the index; longer ends are found among the places of these
LOOKED_AT = 256  # most places of an n-gram that are looked at, the newest
_GAP = -1  # between two texts


class Suffix(Proposer):
    """Drafts the tree of the likeliest continuations, by what followed the same tokens before.

    For every length `p` that the end of the text has in common with earlier places, a tree of at most `factor * p`
    nodes is grown, likeliest node first, of those with a chance of at least `least`; the chance of a node is that of
    its parent times the share of the parent's places that went on with it. The tree with the highest sum of chances
    is proposed, whether it comes from this request's prompt and answer or from past answers of this proposer.

    past: tokens of those that are kept. Raises `TercelError` for numbers that mean nothing.
    """

    name = SUFFIX

    def __init__(
        self, shape: TreeShape | None = None, factor: float = FACTOR, least: float = LEAST, past: int = PAST
    ) -> None:
        if not (0 < factor < math.inf and 0 <= least <= 1 and past >= 0):
            raise TercelError(
                "suffix drafting needs a factor above 0, a least chance between 0 and 1 and a number of past tokens, "
                f"not {factor}, {least} and {past}"
            )
        self.shape = shape or LARGEST
        self.max_nodes, self.needs_tree = self.shape.nodes, self.shape.top_k > 1
        self._factor, self._least = factor, least
        self._past = Texts(past)
        self._rows: list[_Known] = []

    def reset(self, capacity: int) -> None:
        self.select_rows(())

    def admit(self, rows: Sequence[Row], prompts: Sequence[TargetOutput]) -> None:
        self._rows += [_Known(row, len(row.tokens) - 1) for row in rows]

    def select_rows(self, rows: Sequence[int]) -> None:
        for place, known in enumerate(self._rows):
            if place not in rows:  # its answer is a past one from now on
                self._past.add(known.row.tokens[known.prompt :])
        self._rows = [self._rows[row] for row in rows]

    def propose(self, rows: Sequence[Row]) -> list[Proposal]:
        proposals = []
        for row, known in zip(rows, self._rows, strict=True):
            known.own.extend(row.tokens[len(known.own) :])
            grown = [
                self._grow(texts, places, min(self.shape.nodes - 1, math.ceil(self._factor * length)))
                for texts in (known.own, self._past)
                for length, places in texts.matches(row.tokens)
            ]
            best = max(grown, key=lambda tree: tree.score, default=_Grown())
            proposals.append(best.proposal(row.tokens[-1]))
        return proposals

    def _grow(self, texts: Texts, places: list[int], nodes: int) -> _Grown:
        """The likeliest `nodes` nodes behind a piece of text that ended at `places`."""
        grown, ahead, order = _Grown(), list[tuple[float, int, _Node]](), 0

        def look(places: list[int], parent: int, depth: int, chance: float) -> None:
            nonlocal order
            for token, after, share in islice(texts.next(places), self.shape.top_k):
                if chance * share >= self._least:
                    order += 1
                    heapq.heappush(ahead, (-chance * share, order, _Node(token, parent, depth, share, after)))

        look(places, 0, 1, 1.0)
        while ahead and len(grown.tokens) < nodes:
            chance, _, node = heapq.heappop(ahead)
            grown.add(node, -chance)
            if node.depth < self.shape.depth:
                look(node.places, len(grown.tokens), node.depth + 1, -chance)
        return grown


class Texts:
    """Texts, one after another, and where every n-gram of up to `KEY` tokens ends in them. most: tokens that are kept;
    None for all."""

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self._tokens: list[int] = []
        self._first = 0  # place of the first token that is still there
        self._lengths: deque[int] = deque()  # of the texts, with the gap after each
        self._ends: dict[tuple[int, ...], deque[int]] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    def add(self, text: Sequence[int]) -> None:
        """A whole text; older ones are forgotten for it."""
        text = text[max(0, len(text) + 1 - self._most) :] if self._most is not None else text
        if self._most == 0 or not len(text):
            return
        self.extend(text)
        self._tokens.append(_GAP)
        self._lengths.append(len(text) + 1)
        while self._most is not None and len(self._tokens) > self._most:
            self._forget(self._lengths.popleft())

    def extend(self, tokens: Sequence[int]) -> None:
        """The last text goes on with these."""
        for token in tokens:
            self._tokens.append(token)
            for key in self._keys(len(self._tokens)):
                self._ends.setdefault(key, deque()).append(self._first + len(self._tokens))

    def _keys(self, end: int) -> Iterator[tuple[int, ...]]:
        """The n-grams of one text that end there."""
        for n in range(1, min(KEY, end) + 1):
            if self._tokens[end - n] == _GAP:
                return
            yield tuple(self._tokens[end - n : end])

    def _forget(self, count: int) -> None:
        for end in range(1, count):  # but the gap
            for key in self._keys(end):
                self._ends[key].popleft()
                if not self._ends[key]:
                    del self._ends[key]
        del self._tokens[:count]
        self._first += count

    def matches(self, text: Sequence[int]) -> list[tuple[int, list[int]]]:
        """Places behind which a text stands that ends as `text` does, newest first, each set of places once, with how
        many tokens they have in common at least."""
        found: list[tuple[int, list[int]]] = []
        for length in range(1, min(PATTERN, len(text)) + 1):
            if length <= KEY:
                ends = self._ends.get(tuple(text[len(text) - length :]), ())
                places = [end for end in islice(reversed(ends), LOOKED_AT) if self._at(end) != _GAP]
            else:
                places = [end for end in found[-1][1] if self._at(end - length) == text[-length]]
            if not places:
                break
            if found and len(found[-1][1]) == len(places):
                found.pop()
            found.append((length, places))
        return found

    def next(self, places: Sequence[int]) -> Iterator[tuple[int, list[int], float]]:
        """How texts go on behind these places: tokens, most frequent and then newest first, the places behind them, and
        their shares."""
        by_token: dict[int, list[int]] = {}
        for place in places:
            if (token := self._at(place)) != _GAP:
                by_token.setdefault(token, []).append(place + 1)
        count = sum(map(len, by_token.values()))
        for token, after in sorted(by_token.items(), key=lambda item: -len(item[1])):
            yield token, after, len(after) / count

    def _at(self, place: int) -> int:
        place -= self._first
        return self._tokens[place] if 0 <= place < len(self._tokens) else _GAP


@dataclass(frozen=True)
class _Known:
    """A row: its request, the length of the prompt, and its text so far."""

    row: Row
    prompt: int
    own: Texts = field(default_factory=Texts)


@dataclass(frozen=True)
class _Node:
    token: int
    parent: int
    depth: int
    share: float
    places: list[int]


@dataclass
class _Grown:
    """A tree without its root, and the sum of its nodes' chances."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    score: float = 0.0

    def add(self, node: _Node, chance: float) -> None:
        self.tokens.append(node.token)
        self.parents.append(node.parent)
        self.shares.append(node.share)
        self.score += chance

    def proposal(self, root: int) -> Proposal:
        tree = DraftTree([root, *self.tokens], [-1, *self.parents])
        return Proposal(tree, log_q=np.log([1.0, *self.shares]))


def _make(parts: Parts) -> Suffix:
    chains = parts.shape is None and not parts.target.tree_support.tree
    return Suffix(TreeShape.chain(LARGEST.depth) if chains else parts.shape)


KIND = ProposerKind(
    _make, about="SuffixDecoding: the same, in past answers too, weighed by how often (arXiv 2411.04975)"
)
