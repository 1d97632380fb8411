"""Tokens as clients see them: text, bytes, and how likely they were."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from tercel.chat.tokenizing import detokenize
from tercel.decode.logprobs import TokenLogprob
from tercel.decode.streaming import BYTE_PIECE, REPLACEMENT


class TokenTexts:
    """Of one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def text(self, token: int) -> str:
        """By itself; a part of a character is a replacement character."""
        return detokenize(self._tokenizer, [token], clean_up=False)

    def bytes(self, token: int) -> list[int]:
        """Of its text, and of a part of a character what it adds to it."""
        text = self.text(token)
        if REPLACEMENT not in text:
            return list(text.encode())
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if isinstance(piece, str) and BYTE_PIECE.fullmatch(piece):
            return [int(piece[3:5], 16)]
        if isinstance(piece, str) and all(letter in self._byte_of for letter in piece):
            return [self._byte_of[letter] for letter in piece]
        return list(text.encode())

    @cached_property
    def _byte_of(self) -> dict[str, int]:
        """The letters that byte-level vocabularies write for bytes: itself where it is printable, else the next free
        character beyond Latin-1."""
        shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
        hidden = [byte for byte in range(256) if byte not in shown]
        return {chr(byte): byte for byte in shown} | {chr(256 + i): byte for i, byte in enumerate(hidden)}

    def chat_entry(self, told: TokenLogprob) -> dict[str, Any]:
        """As chat completions have it."""
        likeliest = [self._entry(*pair) for pair in told.likeliest]
        return {**self._entry(told.token, told.logprob), "top_logprobs": likeliest}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        # JSON has no infinity; OpenAI writes this for what is next to impossible
        return {"token": self.text(token), "logprob": max(logprob, -9999.0), "bytes": self.bytes(token)}

    def completion_entries(self, told: list[TokenLogprob | None], ids: list[int], start: int) -> dict[str, Any]:
        """As completions have it: of tokens `ids`, whose text begins at `start`; None for one with nothing before."""
        texts, offsets = [self.text(token) for token in ids], []
        for text in texts:
            offsets.append(start)
            start += len(text)
        tops = [None if one is None else self._tops(one) for one in told]
        logprobs = [None if one is None else max(one.logprob, -9999.0) for one in told]
        return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}

    def _tops(self, one: TokenLogprob) -> dict[str, float]:
        """By text; of tokens that have the same (parts of characters), the likelier."""
        tops: dict[str, float] = {}
        for token, value in (*one.likeliest, (one.token, one.logprob)):
            tops.setdefault(self.text(token), max(value, -9999.0))
        return tops
