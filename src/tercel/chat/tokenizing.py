"""The one way to a tokenizer: a text that it cannot take, or that it breaks on, ends as one sentence."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import BatchEncoding, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tercel import limits
from tercel.errors import TercelError
from tercel.reading import no_text


class UnfitTextError(TercelError):
    """A text that the tokenizer cannot take; other texts may do."""


@contextmanager
def guarded() -> Iterator[None]:
    """Turn a panic of the tokenizers' Rust code, which is no `Exception` (and has no type to be named by), into a
    `RuntimeError`; an interruption by the user or the interpreter passes."""
    try:
        yield
    except BaseException as error:
        if type(error).__module__ != "pyo3_runtime":
            raise
        raise RuntimeError(str(error) or "it panicked") from error


def check_growth(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises `TercelError` if the rules that rewrite a text before it is tokenised, or after, make it far longer: they
    run in code that ends the whole program when memory does."""
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return
    for rules in (tokenizer.backend_tokenizer.normalizer, tokenizer.backend_tokenizer.decoder):
        growth = _growth(json.loads(rules.__getstate__())) if rules is not None else 1.0
        if growth > limits.TEXT_GROWTH:
            raise TercelError(
                f"the tokenizer of {tokenizer.name_or_path or 'the target'} rewrites texts into up to {growth:.0e} "
                f"times as many characters; more than {limits.TEXT_GROWTH} is a mistake or an attack, so save it again"
            )


def _growth(rules: dict[str, Any]) -> float:
    """How many times longer the rules, as the library writes them, can make a text."""
    growth = 1.0
    for part in (*rules.get("normalizers", ()), *rules.get("decoders", ())):
        growth *= _growth(part)
    if rules.get("type") == "Replace":
        found = len(rules["pattern"].get("String", "")) or 1  # a regular expression may find a single character
        growth *= max(1.0, len(rules["content"]) / found)
    return growth


def tokenize(
    tokenizer: PreTrainedTokenizerBase, text: str, *, special_tokens: bool = False, offsets: bool = False
) -> BatchEncoding:
    """`text` as `input_ids`, with the `offset_mapping` if asked for. Raises `UnfitTextError` if that cannot be."""
    if len(text) > limits.TEXT_CHARACTERS:
        raise UnfitTextError(
            f"a text of {len(text):,} characters is more than the {limits.TEXT_CHARACTERS:,} that are tokenised at "
            "once; shorten it"
        )
    if problem := no_text(text):
        raise UnfitTextError(f"{problem}, which cannot be tokenised; remove it from the text")
    try:
        with guarded():
            return tokenizer(
                text, add_special_tokens=special_tokens, return_offsets_mapping=offsets, verbose=False
            )
    except Exception as error:  # whatever foreign files of a tokenizer lead to
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UnfitTextError(
            f"the tokenizer of {tokenizer.name_or_path or 'the target'} fails on a text of {len(text):,} characters "
            f"({reason}); is its tokenizer.json whole, and of this model?"
        ) from error
