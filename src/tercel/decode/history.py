"""The tokens of one request, with what the processors ask of them kept up to date token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from tercel.errors import TercelError


class TokenConstraint(Protocol):
    """Which tokens may come next, by those generated so far: of a grammar, say. It is told of every token that comes or
    is taken back, as on a path of the draft tree."""

    def push(self, token: int) -> None: ...

    def pop(self, count: int) -> None: ...

    def allowed(self) -> Tensor:
        """bool `[V]`, on the host. Raises `TercelError` if that cannot be told."""
        ...


class TokenHistory:
    """The tokens of one request, with the counts and n-grams that processors need kept in O(1) per token.

    To look at a path of the draft tree, `push` its tokens and `pop` them again: nothing of size V is copied.
    Counts and n-grams are made when a processor first asks for them, so requests without never pay for them.
    All of it lies on the host, where every processor works. constraint: what else may come, this request's own.

    Raises `TercelError` if the prompt holds an id outside the vocabulary.
    """

    def __init__(self, prompt: Sequence[int], vocab_size: int, constraint: TokenConstraint | None = None) -> None:
        for token in prompt:
            if not 0 <= token < vocab_size:
                raise TercelError(
                    f"the prompt holds token id {token}, but the target's vocabulary has "
                    f"{vocab_size} entries; use the target's own tokenizer"
                )
        self.prompt = tuple(prompt)
        self.tokens = list(prompt)  # with the answer so far
        self.constraint = constraint
        self._vocab_size = vocab_size
        self._counts: Tensor | None = None  # [2, V] int32; row 0: answer, row 1: prompt and answer
        self._ngrams: dict[int, dict[tuple[int, ...], list[int]]] = {}  # by length n: the first n - 1 → the last ones

    @property
    def position(self) -> int:
        """Index of the next generated token: the number of those pushed so far, path included."""
        return len(self.tokens) - len(self.prompt)

    @property
    def generated(self) -> list[int]:
        """The answer so far, path included."""
        return self.tokens[len(self.prompt) :]

    def push(self, token: int) -> None:
        self.tokens.append(token)
        if self.constraint is not None:
            self.constraint.push(token)
        if self._counts is not None:
            self._counts[:, token] += 1
        for length, ngrams in self._ngrams.items():
            if len(self.tokens) >= length:
                ngrams.setdefault(self._before_last(length), []).append(token)

    def pop(self, count: int = 1) -> None:
        """Take back the last `count` pushed tokens."""
        if count > self.position:
            raise ValueError(f"cannot pop {count} of {self.position} generated tokens")
        if self.constraint is not None:
            self.constraint.pop(count)
        for _ in range(count):
            for length, ngrams in self._ngrams.items():
                if len(self.tokens) >= length:
                    ngrams[self._before_last(length)].pop()
            token = self.tokens.pop()
            if self._counts is not None:
                self._counts[:, token] -= 1

    def generated_counts(self) -> Tensor:
        """How often each token is in the answer so far, int32 [V]; a view, not to be written to."""
        return self._count_rows()[0]

    def seen_counts(self) -> Tensor:
        """The same for prompt and answer together, int32 [V]; a view, not to be written to."""
        return self._count_rows()[1]

    def completions(self, length: int) -> Sequence[int]:
        """The tokens that would repeat an n-gram of `length` tokens of prompt and answer."""
        if length not in self._ngrams:
            ngrams: dict[tuple[int, ...], list[int]] = {}
            for end in range(length, len(self.tokens) + 1):
                ngrams.setdefault(tuple(self.tokens[end - length : end - 1]), []).append(self.tokens[end - 1])
            self._ngrams[length] = ngrams
        if len(self.tokens) < length:
            return ()
        return self._ngrams[length].get(tuple(self.tokens[len(self.tokens) - length + 1 :]), ())

    def _before_last(self, length: int) -> tuple[int, ...]:
        return tuple(self.tokens[-length:-1])

    def _count_rows(self) -> Tensor:
        if self._counts is None:
            answer, prompt = (
                torch.bincount(torch.tensor(ids, dtype=torch.long), minlength=self._vocab_size)
                for ids in (self.generated, self.prompt)
            )
            self._counts = torch.stack([answer, answer + prompt]).to(torch.int32)
        return self._counts
