"""What a model's generation config may ask of an answer beyond penalties: which tokens may come where.

Fields have the names of `transformers.GenerationConfig`, and each does exactly what the processor of that name does
in stock `generate()`, in its order (`V` is the target's vocabulary):

1. sequence_bias, (repetition and other penalties, which are `SamplingParams`' own,) 2. no_repeat_ngram_size,
3. bad_words_ids, 4. min_length and min_new_tokens, 5. forced_bos_token_id, 6. forced_eos_token_id,
7. remove_invalid_values, 8. exponential_decay_length_penalty, 9. suppress_tokens, 10. begin_suppress_tokens,
11. renormalize_logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeGuard, TypeVar

import torch
from torch import Tensor

from tercel import limits
from tercel.decode.history import TokenHistory
from tercel.errors import TercelError
from tercel.reading import short

Ids = tuple[int, ...]
Value = TypeVar("Value")


@dataclass(frozen=True)
class TokenRules:
    """Rules of one request; the default has none.

    sequence_bias: pairs of token ids and an addend to the last of them, where the others came before.
    forced_eos_token_id: the only tokens allowed at the last place. exponential_decay_length_penalty: from which
    place on the end gets likelier, and by which factor. eos_token_ids: the target's ends, which the rules on
    length are about (none with `ignore_eos`).

    Raises `TercelError` for a value that is none of the kind.
    """

    sequence_bias: tuple[tuple[Ids, float], ...] = ()
    no_repeat_ngram_size: int = 0
    bad_words_ids: tuple[Ids, ...] = ()
    min_length: int = 0
    min_new_tokens: int = 0
    forced_bos_token_id: int | None = None
    forced_eos_token_id: Ids = ()
    remove_invalid_values: bool = False
    exponential_decay_length_penalty: tuple[int, float] | None = None
    suppress_tokens: Ids = ()
    begin_suppress_tokens: Ids = ()
    renormalize_logits: bool = False
    eos_token_ids: Ids = ()

    def __post_init__(self) -> None:
        decay, forced = self.exponential_decay_length_penalty, self.forced_bos_token_id
        fine = {
            "sequence_bias": _all_fine(self.sequence_bias, _is_bias),
            "bad_words_ids": _all_fine(self.bad_words_ids, lambda ids: _are_ids(ids, 1)),
            "forced_bos_token_id": forced is None or is_id(forced),
            "exponential_decay_length_penalty": decay is None or (_is_pair(decay) and is_id(decay[0])),
            "remove_invalid_values": isinstance(self.remove_invalid_values, bool),
            "renormalize_logits": isinstance(self.renormalize_logits, bool),
        }
        for name in ("no_repeat_ngram_size", "min_length", "min_new_tokens"):
            fine[name] = is_id(getattr(self, name))
        for name in ("forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens", "eos_token_ids"):
            fine[name] = _are_ids(getattr(self, name))
        for name, good in fine.items():
            if not good:
                raise TercelError(f"the rule {name} cannot be {short(getattr(self, name))}")

    @cached_property
    def off(self) -> bool:
        """Whether they change nothing."""
        return self == TokenRules(eos_token_ids=self.eos_token_ids)

    @cached_property
    def highest_id(self) -> int:
        """The highest id that any rule names; -1 without one."""
        sequences = (*(ids for ids, _ in self.sequence_bias), *self.bad_words_ids)
        forced = () if self.forced_bos_token_id is None else (self.forced_bos_token_id,)
        lists = (self.forced_eos_token_id, self.suppress_tokens, self.begin_suppress_tokens, forced, *sequences)
        return max((token for ids in lists for token in ids), default=-1)

    def biases(self, history: TokenHistory) -> Iterator[tuple[int, float]]:
        """Tokens that would complete a biased sequence, with their addends."""
        return self._bias.completions(history)

    def restrict(self, scores: Tensor, history: TokenHistory, ends: Collection[int], max_new_tokens: int) -> Tensor:
        """Scores [V] on the host after every rule but the bias; what is forbidden is -inf.

        ends: the ids that end the answer.
        """
        ends = [end for end in dict.fromkeys(ends) if end < len(scores)]
        forbidden = list(history.completions(self.no_repeat_ngram_size)) if self.no_repeat_ngram_size else []
        forbidden += [token for token, single in self._bad_words.completions(history) if not (single and token in ends)]
        if history.position < self.min_new_tokens or len(history.tokens) < self.min_length:
            forbidden += ends
        scores = _forbid(scores, forbidden)
        if self.forced_bos_token_id is not None and len(history.tokens) == 1:
            scores = _only(scores, (self.forced_bos_token_id,))
        if self.forced_eos_token_id and history.position == max_new_tokens - 1:
            scores = _only(scores, self.forced_eos_token_id)
        if self.remove_invalid_values:
            scores = torch.nan_to_num(scores)
        scores = self._urge(scores, history, ends)
        scores = _forbid(scores, self.suppress_tokens)
        late = self.forced_bos_token_id is not None and len(history.prompt) == 1  # the forced token is not the answer's
        if history.position == int(late):
            scores = _forbid(scores, self.begin_suppress_tokens)
        return scores.log_softmax(0) if self.renormalize_logits else scores

    def _urge(self, scores: Tensor, history: TokenHistory, ends: Sequence[int]) -> Tensor:
        """The ends more likely, the longer the answer."""
        if self.exponential_decay_length_penalty is None or not ends:
            return scores
        start, factor = self.exponential_decay_length_penalty
        beyond = history.position - start
        if beyond <= 0:
            return scores
        try:
            growth = float(factor) ** beyond
        except OverflowError:
            growth = limits.LOGIT
        growth = max(-limits.LOGIT, min(growth, limits.LOGIT))
        ids = torch.tensor(ends)
        addend = scores[ids].abs() * (growth - 1)
        return scores.index_add(0, ids, addend.masked_fill(~scores[ids].isfinite(), 0.0))

    @cached_property
    def _bias(self) -> _BySuffix[float]:
        return _BySuffix(self.sequence_bias)

    @cached_property
    def _bad_words(self) -> _BySuffix[bool]:
        return _BySuffix((ids, len(ids) == 1) for ids in self.bad_words_ids)


class _BySuffix(Generic[Value]):
    """Token sequences, found by what has to come before their last token."""

    def __init__(self, sequences: Iterable[tuple[Ids, Value]]) -> None:
        self._found: dict[int, dict[Ids, dict[int, Value]]] = {}  # length and tokens before → last token → value
        for ids, value in sequences:
            self._found.setdefault(len(ids) - 1, {}).setdefault(ids[:-1], {})[ids[-1]] = value

    def completions(self, history: TokenHistory) -> Iterator[tuple[int, Value]]:
        tokens = history.tokens
        for length, by_suffix in self._found.items():
            if length <= len(tokens):
                yield from by_suffix.get(tuple(tokens[len(tokens) - length :]), {}).items()


def is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _all_fine(values: object, fine: Callable[[Any], bool]) -> bool:
    return isinstance(values, tuple) and all(map(fine, values))


def _are_ids(values: object, at_least: int = 0) -> bool:
    return isinstance(values, tuple) and len(values) >= at_least and all(map(is_id, values))


def _is_pair(value: object) -> TypeGuard[tuple[Any, int | float]]:
    """Two things, the second a number, however large, but not NaN."""
    return isinstance(value, tuple) and len(value) == 2 and is_number(value[1]) and value[1] == value[1]


def _is_bias(pair: object) -> bool:
    """Ids, and what can be added to a float32 logit."""
    if not _is_pair(pair) or not _are_ids(pair[0], 1):
        return False
    return bool(abs(pair[1]) <= limits.LOGIT or abs(pair[1]) == math.inf)


def _forbid(scores: Tensor, ids: Sequence[int]) -> Tensor:
    return scores.index_fill(0, torch.tensor(ids), -math.inf) if ids else scores


def _only(scores: Tensor, ids: Sequence[int]) -> Tensor:
    return torch.full_like(scores, -math.inf).index_fill_(0, torch.tensor(ids), 0.0)
