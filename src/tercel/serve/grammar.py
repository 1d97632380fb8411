"""Answers of a given form: a grammar's mask for every path of the draft tree, by llguidance.

`V` is the target's vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from tercel.errors import TercelError
from tercel.serve.failures import ApiError, fault_of
from tercel.target_model.protocol import TargetModel

_SCHEMA = 1 << 17  # characters of a schema


class Grammars:
    """Grammars over one target's tokens, which are read when the first is asked for."""

    def __init__(self, target: TargetModel) -> None:
        self._target = target

    @cached_property
    def _tokens(self) -> LLTokenizer:
        tokenizer, ends = self._target.tokenizer, list(self._target.eos_token_ids)
        if not isinstance(tokenizer, PreTrainedTokenizerFast) or not ends:
            raise TercelError(
                "the model's tokenizer is not one that answers can be held to a form with: it has to be a fast one, "
                "and the model has to have an end token"
            )
        return LLTokenizer(tokenizer.backend_tokenizer.to_str(), n_vocab=self._target.vocab_size, eos_token=ends)

    def of_schema(self, schema: Mapping[str, Any], param: str = "response_format") -> Grammar:
        """JSON that keeps to a schema. Raises `ApiError` for a schema that is none, or that cannot be kept to."""
        text = json.dumps(schema)
        if len(text) > _SCHEMA:
            raise ApiError(f"the JSON schema has more than {_SCHEMA:,} characters", param=param)
        return self._made(LLMatcher.grammar_from_json_schema(text), param)

    def of_lark(self, lark: str, param: str) -> Grammar:
        return self._made(LLMatcher.grammar_from_lark(lark), param)

    def _made(self, source: str, param: str) -> Grammar:
        with fault_of(param):
            tokens = self._tokens
        matcher = LLMatcher(tokens, source, log_level=0)
        if matcher.is_error():
            reason = " ".join(matcher.get_error().split())[:300]
            raise ApiError(f"answers cannot be held to this form: {reason}", param=param)
        return Grammar(matcher)


class Grammar:
    """Makes a constraint for every answer that is held to it. matcher: at the grammar's beginning."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def __call__(self) -> GrammarConstraint:
        return GrammarConstraint(self._matcher.deep_copy())


class GrammarConstraint:
    """A `TokenConstraint`: where in the grammar one answer is. What is pushed is read when the mask is asked for, so
    that a path that nobody asks about costs nothing."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self._path: list[int] = []
        self._read = 0  # tokens of the path that the matcher has consumed, none behind the form's end

    def push(self, token: int) -> None:
        self._path.append(token)

    def pop(self, count: int) -> None:
        del self._path[len(self._path) - count :]
        if self._read > len(self._path):
            self._matcher.rollback(self._read - len(self._path))
            self._read = len(self._path)

    def allowed(self) -> Tensor:
        for token in self._path[self._read :]:
            if self._matcher.is_stopped():  # an accepted draft may be the end token: behind it only ends are allowed
                break
            self._matcher.consume_token(token)
            self._read += 1
        mask = torch.from_numpy(np.frombuffer(self._matcher.compute_logit_bias(), dtype=np.uint8) > 0)
        if self._matcher.is_error():
            reason = " ".join(self._matcher.get_error().split())[:300]
            raise TercelError(f"the form that the answer is held to cannot be followed any further: {reason}")
        return mask
