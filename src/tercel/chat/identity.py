"""Which chat template a head was trained under, so that another one can be noticed when it serves."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass

from transformers import PreTrainedTokenizerBase

from tercel.chat.conversation import Message
from tercel.chat.template import render_text

RECORD = "chat_template"  # key of a head's training record
QUESTION, ANSWER = Message("user", "What is 2 + 2?"), Message("assistant", "It is 4.")


@dataclass(frozen=True)
class TemplateIdentity:
    """Short digests of a chat template's source and of what it makes of a fixed conversation."""

    source: str
    rendered: str

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> TemplateIdentity:
        """Raises `TemplateRefusalError` if the template refuses a question, its answer and another question."""
        messages = [QUESTION, ANSWER, QUESTION]
        return cls(_digest(tokenizer.get_chat_template()), _digest(render_text(tokenizer, messages, prompt=True)))

    def to_json(self) -> dict[str, str]:
        return asdict(self)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
