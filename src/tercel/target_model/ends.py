"""Where an answer ends: models say so in up to four places, and not always the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from tercel.chat.template import encode, learn_template
from tercel.errors import TercelError

Sources = Mapping[str, tuple[int, ...]]


def turn_end(tokenizer: PreTrainedTokenizerBase | None) -> tuple[int, ...]:
    """The token that the chat template puts after an answer; none without a template, or where it puts no token."""
    if tokenizer is None or not tokenizer.chat_template:
        return ()
    try:
        end = learn_template(tokenizer).end
    except TercelError:  # a template of another kind; whoever renders with it is told
        return ()
    return tuple(encode(tokenizer, end)[-1:]) if end else ()


def end_ids(name: str, said: Any, vocab_size: int) -> tuple[int, ...]:
    """An `eos_token_id` (None, an id or a list) as ids of the vocabulary; others can never be generated.

    Raises `TercelError` for anything else, which stands in `name`.
    """
    ids = () if said is None else tuple(said) if isinstance(said, list | tuple) else (said,)
    for value in ids:
        if not isinstance(value, int) or isinstance(value, bool):
            raise TercelError(f"eos_token_id of {name} is {said!r}; give a token id or a list of them")
    return tuple(value for value in ids if 0 <= value < vocab_size)


def union(sources: Sources) -> tuple[int, ...]:
    return tuple(dict.fromkeys(end for ids in sources.values() for end in ids))


def disagreement(sources: Sources, tokenizer: PreTrainedTokenizerBase | None) -> str:
    """One sentence on ends that the first of the sources does not know, or "" if it knows all."""
    said = [(name, ids) for name, ids in sources.items() if ids]
    if not said:
        return ""
    first, known = said[0]
    others = {end: name for name, ids in reversed(said) for end in ids if end not in known}
    if not others:
        return ""
    more = ", ".join(f"{_shown(end, tokenizer)} ({name})" for end, name in sorted(others.items()))
    known_ends = ", ".join(_shown(end, tokenizer) for end in known)
    return f"{first} ends an answer at {known_ends}; here it also ends at {more}"


def _shown(token: int, tokenizer: PreTrainedTokenizerBase | None) -> str:
    return f"token {token}" if tokenizer is None else f"{tokenizer.convert_ids_to_tokens(token)!r}"
