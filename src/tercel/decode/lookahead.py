"""Lookahead decoding (arXiv 2402.02057): the target guesses for itself, many positions at once, and what it guesses is
remembered as n-grams, to be drafted when their first token comes up.

A window of `W` columns and `N - 1` levels is computed beside the drafts of every step. Its first level holds the last
token of the text and then guesses; a token of level `l` in column `j` stands `l + j` positions behind the last token.
It sees the first level as far as its column, and the levels above it in its column:

    level 0   x0  a1  a2  a3        the last level's outputs (what the target would say behind each) are better guesses
    level 1   b1  b2  b3  b4        for the positions after them: they become a level of the next step's window, which
    level 2   c2  c3  c4  c5        moves on (Jacobi iteration), and the first level goes
    outputs   d3  d4  d5  d6        a column (a1 b2 c3 d4) is an n-gram that the target has found coherent

A step is one forward: the drafts are the proposal's tree, the window is its `Aside`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from random import Random

import numpy as np
import torch
from numpy.typing import NDArray

from tercel.decode.draft_tree import DraftTree
from tercel.decode.proposer import Proposer, Row
from tercel.decode.proposers import LOOKAHEAD, Parts, ProposerKind
from tercel.decode.sampling import best_tokens
from tercel.decode.types import Aside, AsideOutput, Committed, Proposal
from tercel.errors import TercelError
from tercel.target_model.output import TargetOutput
from tercel.target_model.protocol import TargetModel

WINDOW, NGRAM, GUESSES = 15, 5, 15  # as published for models of 7 B
POOL = 1 << 13  # first tokens whose n-grams a row remembers, the newest


class Lookahead(Proposer):
    """Drafts the n-grams of `ngram` tokens that begin with the last token, at most `guesses`, the newest first, and has
    a window of `window` columns computed beside them. nodes: the most that is drafted, root included.

    Raises `TercelError` for sizes that leave nothing to compute, and for a target that cannot verify trees.
    """

    name = LOOKAHEAD
    needs_tree = True

    def __init__(
        self,
        target: TargetModel,
        window: int = WINDOW,
        ngram: int = NGRAM,
        guesses: int = GUESSES,
        nodes: int | None = None,
    ) -> None:
        if min(window, guesses, ngram - 1) < 1:
            raise TercelError(
                "lookahead needs a window of at least one column, n-grams of at least two tokens and at least one "
                f"guess, not {window}, {ngram} and {guesses}"
            )
        if not target.tree_support.tree:
            raise TercelError(
                f"{target.source.name} cannot be decoded by lookahead, which computes a window beside the text and "
                f"needs what draft trees need: {target.tree_support.reason}; draft with pld or suffix"
            )
        self.target, self.window, self.levels, self.guesses = target, window, ngram - 1, guesses
        most = 1 + guesses * (ngram - 1)
        self._nodes = most if nodes is None else min(nodes, most)
        self.max_nodes = self._nodes + window * self.levels - 1
        self._rows: list[_Window] = []

    def reset(self, capacity: int) -> None:
        self._rows = []

    def admit(self, rows: Sequence[Row], prompts: Sequence[TargetOutput]) -> None:
        self._rows += [_Window(row, self.window, self.levels, self.guesses) for row in rows]

    def select_rows(self, rows: Sequence[int]) -> None:
        self._rows = [self._rows[row] for row in rows]

    def propose(self, rows: Sequence[Row]) -> list[Proposal]:
        return [
            Proposal(DraftTree.merged(row.tokens[-1], own.guessed(row.tokens[-1]), self._nodes), aside=own.aside())
            for row, own in zip(rows, self._rows, strict=True)
        ]

    @torch.no_grad()
    def commit(self, committed: Sequence[Committed]) -> None:
        outputs = [own.last(known.aside) for own, known in zip(self._rows, committed, strict=True)]
        asked = [
            known.aside.output.hidden[0, list(places.values())]
            for known, places in zip(committed, outputs, strict=True)
            if known.aside is not None and places
        ]
        best = iter(best_tokens(self.target.logits(torch.cat(asked))) if asked else ())
        for own, known, places in zip(self._rows, committed, outputs, strict=True):
            said = {column: next(best) for column in places}  # -1 where logits are no numbers
            own.move(len(known.tokens), {column: token for column, token in said.items() if token >= 0})


class _Window:
    """One row's window and n-grams. While it has fewer than `most` levels, every step adds one."""

    def __init__(self, row: Row, width: int, most: int, guesses: int) -> None:
        self._row, self._width, self._most, self._guesses = row, width, most, guesses
        self._random = Random(row.stream.seed)  # what fills the window is no part of the text
        self._levels = [self._any(width)]
        self._pool: dict[int, list[tuple[int, ...]]] = {}  # by the first token, the newest last

    def guessed(self, token: int) -> list[tuple[int, ...]]:
        return self._pool.get(token, [])[::-1]

    def aside(self) -> Aside | None:
        """The window but for its first token, which is the tree's root."""
        self._levels[0][0] = self._row.tokens[-1]
        tokens = [token for level in self._levels for token in level][1:]
        if not tokens:
            return None
        depths = [level + column for level in range(len(self._levels)) for column in range(self._width)][1:]
        return Aside(tokens, depths, _seen(len(self._levels), self._width))

    def last(self, aside: AsideOutput | None) -> dict[int, int]:
        """The columns whose token of the last level was run, and where its output is."""
        if aside is None:
            return {}
        first = (len(self._levels) - 1) * self._width - 1
        return {number - first: place for place, number in enumerate(aside.numbers) if number >= first}

    def move(self, count: int, outputs: dict[int, int]) -> None:
        """`count` tokens were committed; `outputs` by column: what the target says behind the last level."""
        levels, moved = self._levels, count
        if outputs:
            levels = [*levels, [outputs.get(column, self._some()) for column in range(self._width)]]
        if len(levels) > self._most:
            for column in outputs:
                self._remember([level[column] for level in levels])
            levels, moved = levels[1:], count - 1
        self._levels = [[*level[moved:], *self._any(min(moved, self._width))] for level in levels]

    def _remember(self, ngram: list[int]) -> None:
        first, rest = ngram[0], tuple(ngram[1:])
        known = [other for other in self._pool.pop(first, []) if other != rest]
        self._pool[first] = [*known, rest][-self._guesses :]
        if len(self._pool) > POOL:
            del self._pool[next(iter(self._pool))]

    def _any(self, count: int) -> list[int]:
        return [self._some() for _ in range(count)]

    def _some(self) -> int:
        """One of the text's tokens."""
        return self._row.tokens[self._random.randrange(len(self._row.tokens))]


@cache
def _seen(levels: int, width: int) -> NDArray[np.bool_]:
    """Who of the window sees whom, level by level, without the first token."""
    place = np.arange(levels * width)
    level, column = place // width, place % width
    first = (level == 0) & (column <= column[:, None])
    above = (level > 0) & (level <= level[:, None]) & (column == column[:, None])
    return (first | above)[1:, 1:]


def _make(parts: Parts) -> Lookahead:
    shape = parts.shape
    if shape is None:
        return Lookahead(parts.target)
    return Lookahead(parts.target, shape.top_k, shape.depth + 1, shape.top_k, shape.nodes)


KIND = ProposerKind(_make, about="the target's own n-grams, out of a window beside the text (arXiv 2402.02057)")
