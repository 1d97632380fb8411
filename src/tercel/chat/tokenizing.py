"""The one way to a tokenizer, and back to text: what it cannot take, or breaks on, ends as one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from transformers import BatchEncoding, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tercel import limits
from tercel.chat.panics import guarded
from tercel.errors import TercelError
from tercel.reading import no_text

Value = TypeVar("Value")


class UnfitTextError(TercelError):
    """A text that the tokenizer cannot take; other texts may do."""


def check_rules(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises `TercelError` if the rules that rewrite a text before it is tokenised, or after, make it far longer (they
    run in code that ends the whole program when memory does), and if those that add special tokens leave the text out
    or name tokens that they do not define."""
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return
    backend, name = tokenizer.backend_tokenizer, tokenizer.name_or_path or "the target"
    if backend.post_processor is not None and (fault := _fault(json.loads(backend.post_processor.__getstate__()))):
        raise TercelError(f"the post-processor in the tokenizer of {name} {fault}; save the model's tokenizer again")
    for rules in (backend.normalizer, backend.decoder):
        growth = _growth(json.loads(rules.__getstate__())) if rules is not None else 1.0
        if growth > limits.TEXT_GROWTH:
            raise TercelError(
                f"the tokenizer of {name} rewrites texts into up to {growth:.0e} "
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


def _fault(rules: dict[str, Any]) -> str | None:
    """What is wrong with a post-processor, as the library writes it; None if nothing is."""
    for part in rules.get("processors", ()):
        if fault := _fault(part):
            return fault
    if rules.get("type") != "TemplateProcessing":
        return None
    named = {piece["SpecialToken"]["id"] for piece in rules["single"] if "SpecialToken" in piece}
    if unknown := sorted(named - rules["special_tokens"].keys()):
        return f"adds the special token {unknown[0]!r}, which it does not define"
    return None if any("Sequence" in piece for piece in rules["single"]) else "leaves out the text itself"


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
    return _told(
        tokenizer,
        f"a text of {len(text):,} characters",
        lambda: tokenizer(text, add_special_tokens=special_tokens, return_offsets_mapping=offsets, verbose=False),
    )


def detokenize(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], *, skip_special: bool = False, clean_up: bool | None = None
) -> str:
    """The text of token ids. clean_up: whether spaces are cleaned up as English has them (None: as the tokenizer's own
    settings say). Raises `TercelError` if that cannot be."""
    return _told(
        tokenizer,
        f"{len(ids):,} of its tokens",
        lambda: str(
            tokenizer.decode(list(ids), skip_special_tokens=skip_special, clean_up_tokenization_spaces=clean_up)
        ),
    )


def _told(tokenizer: PreTrainedTokenizerBase, what: str, work: Callable[[], Value]) -> Value:
    """What `work` on `what` gives; whatever foreign files of a tokenizer lead to is an `UnfitTextError`."""
    try:
        with guarded(hush=True):
            return work()
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UnfitTextError(
            f"the tokenizer of {tokenizer.name_or_path or 'the target'} fails on {what} ({reason}); is its "
            "tokenizer.json whole, and of this model?"
        ) from error
