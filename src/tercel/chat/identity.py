"""Which chat template a head was trained under or answers were asked for with, so that another one can be noticed."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from datetime import datetime

from transformers import PreTrainedTokenizerBase

from tercel.chat.arguments import templates_of, without_arguments
from tercel.chat.conversation import Message
from tercel.chat.dates import as_of
from tercel.chat.template import render_text

SOME_DAY = datetime(2001, 1, 1)  # so that what a template renders is the same on any
QUESTION, ANSWER = Message("user", "What is 2 + 2?"), Message("assistant", "It is 4.")


@dataclass(frozen=True)
class TemplateIdentity:
    """Short digests of a chat template's source, and of what it makes of a fixed conversation with its arguments."""

    source: str
    rendered: str

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> TemplateIdentity:
        """Raises `TemplateRefusalError` if the template refuses a question, its answer and another question."""
        rendered = render_text(as_of(tokenizer, SOME_DAY), [QUESTION, ANSWER, QUESTION], prompt=True)
        return cls(_digest(without_arguments(tokenizer.get_chat_template())), _digest(rendered))


def template_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """A short digest of all that templates write from beside the messages and the date: their sources, with the
    arguments that they were given, and the special tokens."""
    return _digest(json.dumps([templates_of(tokenizer), tokenizer.special_tokens_map], sort_keys=True, default=str))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
