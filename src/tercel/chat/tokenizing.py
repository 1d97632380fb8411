"""The one way to a tokenizer: a text that it cannot take, or that it breaks on, ends as one sentence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import BatchEncoding, PreTrainedTokenizerBase

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
