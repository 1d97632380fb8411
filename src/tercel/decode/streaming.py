"""Text of a growing answer, piece by piece: only what later tokens cannot change any more."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tercel.chat.tokenizing import detokenize

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")  # a byte-fallback token of SentencePiece-like vocabularies
WINDOW = 16  # tokens with stable text that are decoded again, at most
REPLACEMENT = "\ufffd"  # what decoders write for bytes that are no character, or not yet one


class TextStream:
    """Incremental detokenisation that emits stable text only and ends before the first stop string.

    The pieces that `push` and `finish` return add up to `tokenizer.decode(tokens, skip_special_tokens=True,
    clean_up_tokenization_spaces=False)`, cut before the stop string. A piece never holds part of a character,
    nor text that may still turn out to begin a stop string. A stop string counts as found with the first
    token after which the decoded text contains it.

    What is decoded is a short window: the tokens whose text is not yet stable, and before them a few whose text is,
    because decoders treat the beginning of a text unlike its middle.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._longest_hold = max(map(len, self._stop), default=1) - 1
        self._window: list[int] = []  # tokens of the last stable pieces
        self._known = 0  # characters of their text
        self._pending: list[int] = []  # tokens after them
        self._fresh = ""  # their text so far, which may change
        self._held = ""  # stable text that may begin a stop string
        self._pieces: list[str] = []
        self.stopped = False

    @property
    def text(self) -> str:
        """Everything emitted so far."""
        return "".join(self._pieces)

    def push(self, *tokens: int) -> str:
        """Take the next token, or several, if there are no stop strings; return the text that became stable. Sets
        `stopped` at a stop string."""
        if self.stopped:
            raise ValueError("the text has ended at a stop string; start a new TextStream")
        if len(tokens) > 1 and any(map(self._is_byte, tokens)):
            return "".join([self.push(token) for token in tokens])
        self._pending += tokens
        text = self._decode(self._window + self._pending)
        fresh = text[self._known :]
        if fresh == self._fresh:  # a special token, or one more byte of an unfinished character
            if self._window and not fresh:
                self._pending.clear()  # it leaves no trace in the text: keep the window short
            return ""
        self._fresh = fresh
        found = [at for at in map((self._held + fresh).find, self._stop) if at >= 0]
        if found:
            self.stopped = True
            piece = (self._held + fresh)[: min(found)]
            self._held = self._fresh = ""
            return self._emit(piece)
        if fresh.endswith(REPLACEMENT) or self._is_byte(tokens[-1]):
            return ""
        self._window += self._pending
        self._known = len(text)
        if len(self._window) > WINDOW:
            self._window = self._pending
            self._known = len(self._decode(self._window))
        self._pending = []
        stable, self._fresh = self._held + fresh, ""
        hold = self._hold(stable)
        self._held = stable[len(stable) - hold :]
        return self._emit(stable[: len(stable) - hold])

    def finish(self) -> str:
        """End the text; return what was held back."""
        piece = self._held + self._fresh
        self._held = self._fresh = ""
        return self._emit(piece)

    def _emit(self, piece: str) -> str:
        if piece:
            self._pieces.append(piece)
        return piece

    def _hold(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        for length in range(min(self._longest_hold, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                return length
        return 0

    def _is_byte(self, token: int) -> bool:
        # One wrong byte makes these decoders replace every byte of its run: no run is stable before it ends.
        piece = self._tokenizer.convert_ids_to_tokens(token)
        return isinstance(piece, str) and BYTE_PIECE.fullmatch(piece) is not None

    def _decode(self, tokens: list[int]) -> str:
        # Cleaning up spaces would rewrite text already shown, and damages code.
        return detokenize(self._tokenizer, tokens, skip_special=True, clean_up=False)
