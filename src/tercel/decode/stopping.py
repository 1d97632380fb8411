"""When an answer ends: exactly at the token after which token-by-token decoding would have stopped."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tercel.chat.template import special_texts
from tercel.decode.sampling import SamplingParams
from tercel.decode.streaming import TextStream
from tercel.errors import TercelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Interruption = Literal["abort", "error"]
FinishReason = Literal["stop", "length"] | Interruption


@dataclass(frozen=True)
class Emission:
    """What a block of accepted tokens adds to the answer.

    tokens: the block, cut after the token that ended the answer. text: newly stable text, possibly empty.
    finish_reason: "stop" (end or stop token, stop string), "length" (token limit, end of context), "abort" (somebody
    asked for its end), "error" (the request failed) or None (goes on).
    """

    tokens: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None


class StopChecker:
    """Feeds one request's tokens through its stop rules, one by one, however many arrive at once.

    The token that ends the answer belongs to its `tokens`; an end or stop token is not in its text, and the
    text is cut before a stop string. A token that both completes an answer and reaches the limit counts as
    "stop".

    eos_ids: the target's end tokens, without effect under `ignore_eos`. context_room: how many tokens the
    context still holds after the prompt (None: no limit). tokenizer: None for runs that want no text. A stop string
    that spells a special token, which leaves no trace in the text, is found by that token's id.

    Raises `TercelError` if the context has no room, if there are stop strings but no tokenizer, and for a stop string
    with a special token among other characters.
    """

    def __init__(
        self,
        params: SamplingParams,
        eos_ids: Collection[int],
        tokenizer: PreTrainedTokenizerBase | None,
        context_room: int | None = None,
    ) -> None:
        if context_room is not None and context_room < 1:
            raise TercelError(f"the prompt leaves no room in the target's context ({context_room} tokens); shorten it")
        if params.stop and tokenizer is None:
            raise TercelError(f"stop strings {params.stop!r} cannot be found without a tokenizer; pass one")
        self._limit = params.max_new_tokens
        if context_room is not None:
            self._limit = min(self._limit, context_room)
        spelled = () if tokenizer is None else _spelled(params.stop, tokenizer)
        self._stop_ids = frozenset((*params.stop_token_ids, *spelled, *(() if params.ignore_eos else eos_ids)))
        self._stream = None if tokenizer is None else TextStream(tokenizer, params.stop)
        self._each = bool(params.stop)  # whether every token may be the last for its text
        self.tokens: list[int] = []
        self._given = 0  # tokens given out so far
        self._pieces: list[str] = []  # text that was not
        self.finish_reason: FinishReason | None = None

    @property
    def text(self) -> str:
        """All text emitted so far; the whole answer once `finish_reason` is set."""
        return "" if self._stream is None else self._stream.text

    def feed(self, block: Iterable[int]) -> Emission:
        """Append a verified block as far as the answer goes."""
        if self.finish_reason is not None:
            raise ValueError(f"the answer has already ended ({self.finish_reason})")
        new: list[int] = []  # whose text is not known yet
        for token in block:
            self.tokens.append(token)
            if token in self._stop_ids:
                self.finish_reason = "stop"
            else:
                new.append(token)
                if self._each and self._read(new):
                    self.finish_reason = "stop"
            if self.finish_reason is None and len(self.tokens) >= self._limit:
                self.finish_reason = "length"
            if self.finish_reason is not None:
                break
        self._read(new)
        if self.finish_reason is not None and self._stream is not None:
            self._pieces.append(self._stream.finish())
        return self._emission()

    def _read(self, new: list[int]) -> bool:
        """Take text from these tokens, and them from the list; says whether there was a stop string."""
        if self._stream is None or not new:
            return False
        self._pieces.append(self._stream.push(*new))
        new.clear()
        return self._stream.stopped

    def interrupt(self, reason: Interruption) -> Emission:
        """End the answer where it is, with all that was not given out yet."""
        self.finish_reason = reason
        if self._stream is not None:
            self._pieces.append(self._stream.finish())
        return self._emission()

    def _emission(self) -> Emission:
        tokens, text = tuple(self.tokens[self._given :]), "".join(self._pieces)
        self._given = len(self.tokens)
        self._pieces.clear()
        return Emission(tokens, text, self.finish_reason)


def _spelled(stop: Collection[str], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids of the special tokens that stop strings spell."""
    specials = special_texts(tokenizer) if stop else []
    for string in stop:
        inside = [text for text in specials if text in string and string not in specials]
        if inside:
            raise TercelError(
                f"stop string {string!r} holds the special token {inside[0]!r}, which is not part of an answer's text; "
                "give that token as a stop string of its own"
            )
    return [tokenizer.get_vocab()[string] for string in stop if string in specials]
