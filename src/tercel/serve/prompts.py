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
from tercel.serve.failures import ApiError, fault_of
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


@dataclass(frozen=True)
class _Renamed:
    """A tokenizer whose special tokens are spelled in words that nobody knows: what spells them is text. It is given
    whole texts, since what a tokenizer does at the beginning of one it need not do behind a special token."""

    backend: Tokenizer
    words: _Marks

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerFast, specials: Sequence[str]) -> _Renamed:
        rules = json.loads(tokenizer.backend_tokenizer.to_str())
        added, model = rules["added_tokens"], rules["model"]
        words = _Marks.of([token["content"] for token in added if token["content"] in specials])

        def renamed(piece: str) -> str:
            return words.words.get(piece, piece)

        for token in added:
            token["content"] = renamed(token["content"])
        # in its own vocabulary too: a model that chooses among all pieces that fit (Unigram) would find them there
        if isinstance(model.get("vocab"), dict):
            model["vocab"] = {renamed(piece): number for piece, number in model["vocab"].items()}
        elif isinstance(model.get("vocab"), list):
            model["vocab"] = [[renamed(piece), *score] for piece, *score in model["vocab"]]
        if "merges" in model:  # none makes what the vocabulary has no more
            spelled = words.words.keys()
            model["merges"] = [pair for pair in model["merges"] if spelled.isdisjoint((*pair, "".join(pair)))]
        if isinstance(model.get("unk_token"), str):
            model["unk_token"] = renamed(model["unk_token"])
        rules["post_processor"] = rules["truncation"] = rules["padding"] = None
        return cls(Tokenizer.from_str(json.dumps(rules)), words)

    def encode(self, text: str, marks: _Marks) -> list[int]:
        """Ids of a text with its own special tokens as such, and with the marked ones as letters."""
        meant = marks.taken_out(str(self.words.put(text)))
        return list(self.backend.encode(meant, add_special_tokens=False).ids)


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
            with fault_of("messages"):
                return encode(tokenizer, text) if marked == value else self._renamed.encode(text, marks)

    def text(self, text: str) -> list[int]:
        """The ids of a text as it stands, special tokens that are spelled in it included."""
        with self._lock, fault_of("prompt"):
            return list(tokenize(self._tokenizer, text, special_tokens=True)["input_ids"])

    @cached_property
    def _renamed(self) -> _Renamed:
        if not isinstance(self._tokenizer, PreTrainedTokenizerFast):
            raise ApiError(
                "a message spells a special token of the model, which its tokenizer cannot take as text",
                param="messages",
            )
        return _Renamed.of(self._tokenizer, self._specials)

    def _given(self, arguments: str) -> PreTrainedTokenizerBase:
        """The tokenizer with template arguments, a JSON object."""
        with fault_of("chat_template_kwargs"):
            return with_arguments(self._tokenizer, json.loads(arguments))

    @staticmethod
    def _message(row: dict[str, Any], number: int) -> Message:
        content, where = row.get("content"), f"messages[{number}]"
        parts = content if isinstance(content, list) else []
        if any(not isinstance(part, dict) or part.get("type") not in (None, "text") for part in parts):
            raise ApiError(f"{where} holds something other than text, which the model cannot read", param="messages")
        with fault_of("messages"):
            return message_of(row, where)

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
