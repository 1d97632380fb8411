"""The tokens of an answer with their texts, as they come: whose they are, and what each adds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tercel.chat.tokenizing import detokenize
from tercel.decode.streaming import REPLACEMENT, TextStream
from tercel.plain import one_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tercel.decode.types import Event

_VISIBLE = str.maketrans({" ": "␣", "\n": "⏎", "\t": "⇥"})


@dataclass(frozen=True)
class Piece:
    """A token and the text that became stable with it, possibly none: a character made of several tokens comes with
    the last. token: None for text that had been held back when an answer ended without another token. drafted: whether
    it was an accepted draft."""

    token: int | None
    text: str
    drafted: bool


class TokenPieces:
    """Pieces of one request's events."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str]) -> None:
        self._stream = TextStream(tokenizer, stop)

    def of(self, event: Event) -> list[Piece]:
        """What the event adds. The answer's last token has what is left of its text: nothing of an end token's own."""
        tokens, result = event.emission.tokens, event.result
        going_on = tokens if result is None else tokens[:-1]
        pieces = [Piece(token, self._stream.push(token), n < event.drafted) for n, token in enumerate(going_on)]
        if result is not None:
            rest = result.text[len(self._stream.text) :]
            if tokens:
                pieces.append(Piece(tokens[-1], rest, len(tokens) <= event.drafted))
            elif rest:
                pieces.append(Piece(None, rest, False))
        return pieces


class TokenNames:
    """What tokens are called one by one: their text, or their vocabulary's spelling where that is no text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._known: dict[tuple[int | None, int], str] = {}

    def of(self, token: int, before: int | None = None) -> str:
        """As it stands behind `before`: decoders treat the beginning of a text unlike its middle."""
        known = self._known.get((before, token))
        if known is None:
            known = self._known[before, token] = self._name(token, before)
        return known

    def _name(self, token: int, before: int | None) -> str:
        first = "" if before is None else self._text(before)
        both = self._text(token) if before is None else self._text(before, token)
        own = both[len(first) :] if both.startswith(first) else ""
        if own and REPLACEMENT not in own:
            return own
        piece = self._tokenizer.convert_ids_to_tokens(token)
        return piece if isinstance(piece, str) and piece else f"#{token}"

    def _text(self, *tokens: int) -> str:
        return detokenize(self._tokenizer, tokens, clean_up=False)


def shown(name: str) -> str:
    """A token's name on one line, its spaces and line ends visible."""
    return one_line(name.translate(_VISIBLE))
