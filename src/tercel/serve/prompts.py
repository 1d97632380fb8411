"""Chats into prompts: rendered by the target's own template, with text that stays text."""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tercel.chat import Message
from tercel.chat.arguments import with_arguments
from tercel.chat.records import message_of
from tercel.chat.template import TemplateRefusalError, encode, render_text, special_texts
from tercel.chat.tokenizing import tokenize
from tercel.errors import TercelError
from tercel.serve.failures import ApiError
from tercel.serve.schema import ChatRequest

Tools = tuple[dict[str, Any], ...] | None


@dataclass(frozen=True)
class _Marks:
    """Words that stand for the special tokens of a text while a template renders it."""

    words: Mapping[str, str]  # token → word

    @classmethod
    def of(cls, specials: Sequence[str]) -> _Marks:
        secret = secrets.token_hex(8)
        return cls({token: f"q{secret}n{number}q" for number, token in enumerate(specials)})

    def put(self, value: Any) -> Any:
        """A JSON value, its strings marked; the longest token first, where one holds another."""
        if isinstance(value, str):
            for token in sorted(self.words, key=len, reverse=True):
                value = value.replace(token, self.words[token])
            return value
        if isinstance(value, dict):
            return {self.put(name): self.put(item) for name, item in value.items()}
        return [self.put(item) for item in value] if isinstance(value, list) else value

    def taken_out(self, text: str) -> str:
        for token, word in self.words.items():
            text = text.replace(word, token)
        return text


class Prompter:
    """Prompts for one target. The tokenizer's own settings are used by one thread at a time.

    A special token that is spelled in a message is tokenised as the characters that it is made of, unless the client
    says `allow_special_tokens`: what a user types can so end no turn and begin none.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._specials = special_texts(tokenizer)
        self._lock = threading.Lock()
        self._with_arguments = lru_cache(maxsize=8)(self._given)

    def chat(self, asked: ChatRequest) -> list[int]:
        """The prompt's ids. Raises `ApiError` for messages that are none, and for what the template refuses."""
        value: dict[str, Any] = {
            "messages": asked.messages,
            "tools": asked.tools or [],
            "arguments": asked.chat_template_kwargs or {},
        }
        marks = _Marks.of(self._specials)
        marked = value if asked.allow_special_tokens else marks.put(value)
        arguments = marked["arguments"]
        with self._lock:
            tokenizer = self._with_arguments(json.dumps(arguments)) if arguments else self._tokenizer
            if not tokenizer.chat_template:
                raise ApiError("the model has no chat template; ask /v1/completions", param="messages")
            messages = [self._message(row, number) for number, row in enumerate(marked["messages"])]
            tools = self._tools(marked["tools"], tokenizer)
            try:
                text = render_text(tokenizer, messages, tools, prompt=True)
            except TemplateRefusalError as error:
                raise ApiError(f"the model's chat template refuses the messages: {error}", param="messages") from error
            return encode(tokenizer, text) if marked == value else self._apart(text, marks)

    def text(self, text: str) -> list[int]:
        """The ids of a text as it stands, special tokens that are spelled in it included."""
        with self._lock:
            return list(tokenize(self._tokenizer, text, special_tokens=True)["input_ids"])

    def _apart(self, text: str, marks: _Marks) -> list[int]:
        """Ids of what a template wrote, its own special tokens as such and the marked ones letter by letter."""
        ids: list[int] = []
        vocabulary = self._tokenizer.get_vocab()
        for piece, special in _split(text, self._specials):
            ids += (
                [vocabulary[piece]]
                if special
                else self._plain.encode(marks.taken_out(piece), add_special_tokens=False).ids
            )
        return ids

    @cached_property
    def _plain(self) -> Tokenizer:
        """The tokenizer, knowing no special tokens in a text."""
        if not isinstance(self._tokenizer, PreTrainedTokenizerFast):
            raise ApiError("a message spells a special token of the model, which its tokenizer cannot take as text")
        plain = Tokenizer.from_str(self._tokenizer.backend_tokenizer.to_str())
        plain.encode_special_tokens = True
        plain.no_truncation()
        plain.no_padding()
        return plain

    def _given(self, arguments: str) -> PreTrainedTokenizerBase:
        """The tokenizer with template arguments, a JSON object."""
        try:
            return with_arguments(self._tokenizer, json.loads(arguments))
        except TercelError as error:
            raise ApiError(str(error), param="chat_template_kwargs") from error

    @staticmethod
    def _message(row: dict[str, Any], number: int) -> Message:
        content, where = row.get("content"), f"messages[{number}]"
        parts = content if isinstance(content, list) else []
        if any(not isinstance(part, dict) or part.get("type") not in (None, "text") for part in parts):
            raise ApiError(f"{where} holds something other than text, which the model cannot read", param="messages")
        try:
            return message_of(row, where)
        except TercelError as error:
            raise ApiError(str(error), param="messages") from error

    @staticmethod
    def _tools(tools: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase) -> Tools:
        if not tools:
            return None
        for tool in tools:
            if not isinstance(tool.get("function"), dict) or not isinstance(tool["function"].get("name"), str):
                raise ApiError('a tool must be {"type": "function", "function": {"name": …}}', param="tools")
        if "tools" not in tokenizer.get_chat_template(tools=tools):
            raise ApiError("the model's chat template knows no tools; leave them out", param="tools")
        return tuple(tools)


def _split(text: str, specials: Sequence[str]) -> list[tuple[str, bool]]:
    """The text cut into special tokens and what stands between them."""
    pieces = [(text, False)]
    for token in sorted(specials, key=len, reverse=True):
        cut: list[tuple[str, bool]] = []
        for piece, special in pieces:
            if special:
                cut.append((piece, True))
                continue
            first, *rest = piece.split(token)
            cut.append((first, False))
            for part in rest:
                cut += [(token, True), (part, False)]
        pieces = cut
    return [(piece, special) for piece, special in pieces if piece]
