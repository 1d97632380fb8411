"""Prompt lookup decoding (A. Saxena, 2023, github.com/apoorvumang/prompt-lookup-decoding): where the last few tokens
stood before, in prompt or answer, what followed them then is drafted now. No model drafts, and nothing is learned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from tercel.decode.draft_tree import DraftTree
from tercel.decode.proposer import Proposer, Row
from tercel.decode.proposers import PLD, Parts, ProposerKind
from tercel.decode.types import Proposal
from tercel.draft.shape import TreeShape
from tercel.errors import TercelError
from tercel.target_model.output import TargetOutput

MAX_NGRAM, TOKENS = 3, 10  # as published
LOOKED_AT = 64  # most places of an n-gram that are looked at, the newest


class PromptLookup(Proposer):
    """Drafts what followed the longest n-gram that ends the text, at its newest place: a chain; or, with a tree's
    shape, a tree of up to `top_k` different continuations of up to `depth` tokens, from the longest n-gram's newest
    place to the shortest's oldest.

    A continuation that reaches the end of the text goes on with its own beginning, as a text that repeats itself does.
    Raises `TercelError` if n-grams have no tokens.
    """

    name = PLD

    def __init__(self, shape: TreeShape | None = None, max_ngram: int = MAX_NGRAM) -> None:
        if max_ngram < 1:
            raise TercelError(f"prompt lookup compares n-grams of at least one token, not of {max_ngram}")
        self.shape = TreeShape.chain(TOKENS) if shape is None else shape
        self.max_nodes, self.needs_tree = self.shape.nodes, self.shape.top_k > 1
        self._longest = max_ngram
        self._texts: list[NGrams] = []

    def reset(self, capacity: int) -> None:
        self._texts = []

    def admit(self, rows: Sequence[Row], prompts: Sequence[TargetOutput]) -> None:
        self._texts += [NGrams(self._longest) for _ in rows]

    def select_rows(self, rows: Sequence[int]) -> None:
        self._texts = [self._texts[row] for row in rows]

    def propose(self, rows: Sequence[Row]) -> list[Proposal]:
        proposals = []
        for row, text in zip(rows, self._texts, strict=True):
            text.read(row.tokens)
            paths = islice(_different(text.continuations(self.shape.depth)), self.shape.top_k)
            proposals.append(Proposal(DraftTree.merged(row.tokens[-1], paths, self.shape.nodes)))
        return proposals


class NGrams:
    """Where every n-gram of a growing text stands, up to `longest` tokens."""

    def __init__(self, longest: int) -> None:
        self._tokens: list[int] = []
        self._ends: list[dict[tuple[int, ...], list[int]]] = [{} for _ in range(longest)]  # by length, less one

    def read(self, tokens: Sequence[int]) -> None:
        """The text is now `tokens`, which begin as before."""
        for token in tokens[len(self._tokens) :]:
            self._tokens.append(token)
            end = len(self._tokens)
            for n, ends in enumerate(self._ends[:end], 1):
                ends.setdefault(tuple(self._tokens[end - n :]), []).append(end)

    def continuations(self, length: int) -> Iterator[list[int]]:
        """What followed the n-grams that end the text: the longest first, and of each the newest place."""
        here = len(self._tokens)
        for n in range(min(len(self._ends), here), 0, -1):
            ends = self._ends[n - 1][tuple(self._tokens[here - n :])]
            for end in reversed(ends[-1 - LOOKED_AT : -1]):  # without the end itself
                path = self._tokens[end : end + length]
                yield [path[place % len(path)] for place in range(length)] if len(path) < length else path


def _different(paths: Iterator[list[int]]) -> Iterator[list[int]]:
    seen: set[tuple[int, ...]] = set()
    for path in paths:
        if tuple(path) not in seen:
            seen.add(tuple(path))
            yield path


def _make(parts: Parts) -> PromptLookup:
    return PromptLookup(parts.shape)


KIND = ProposerKind(_make, about="prompt lookup: what followed the last tokens before, in prompt or answer")
