"""Calls of tools in answers, as the target's own template writes them: its form is learned by rendering one."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from tercel.chat import Message
from tercel.chat.template import TemplateRefusalError, render_text, special_texts
from tercel.reading import UnreadableError, parse_json

_NAME, _KEY, _VALUE = "tercelcalled", "tercelkey", "tercelvalue"
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "A call.",
        "parameters": {"type": "object", "properties": {_KEY: {"type": "string"}}},
    },
}


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: str  # JSON

    def to_json(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


@dataclass(frozen=True)
class CallFormat:
    """How a template writes a call: a JSON object with the function's name and its arguments under some key, between an
    opening and a closing text, special tokens left out, since they are not part of an answer's text."""

    opening: str
    closing: str
    arguments: str
    listed: bool  # calls stand in a JSON list
    plain: bool  # no special token was left out of the opening

    def starts(self, text: str, whole: bool = False) -> int | None:
        """Where calls begin in an answer so far, or may begin with more of it unless it is `whole`; None if nowhere."""
        opening = self.opening.strip()
        if not opening:  # an answer that is a call begins with it
            body = text.lstrip()
            return 0 if body[:1] in ("{", "[") or (not body and not whole) else None
        at = text.find(opening)
        if at >= 0:
            return at
        held = 0 if whole else next((n for n in range(len(opening) - 1, 0, -1) if text.endswith(opening[:n])), 0)
        return len(text) - held if held else None

    def read(self, text: str, names: Sequence[str]) -> tuple[str, list[ToolCall]]:
        """The content before the calls of an answer, and the calls; the whole text and none, if it holds no calls of
        these functions, or any that is none."""
        start = self.starts(text, whole=True)
        if start is None:
            return text, []
        opening, calls, rest = self.opening.strip(), [], text[start:]
        decoder = json.JSONDecoder()
        while rest.strip():
            rest = rest.lstrip().removeprefix(opening).lstrip() if opening else rest.lstrip(" \n\r\t,;")
            try:
                _, end = decoder.raw_decode(rest)
                value = parse_json(rest[:end])
            except (ValueError, RecursionError, UnreadableError):
                return text, []
            found = [self._call(one, names) for one in (value if isinstance(value, list) else [value])]
            if not found or None in found:
                return text, []
            calls += [call for call in found if call is not None]
            rest = rest[end:].lstrip().removeprefix(self.closing.strip())
        return text[:start].rstrip(), calls

    def lark(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """A grammar of one call of one of the tools."""
        forms = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": tool["function"]["name"]},
                    self.arguments: tool["function"].get("parameters") or {"type": "object"},
                },
                "required": ["name", self.arguments],
                "additionalProperties": False,
            }
            for tool in tools
        ]
        schema: dict[str, Any] = {"anyOf": forms}
        if self.listed:
            schema = {"type": "array", "items": schema, "minItems": 1, "maxItems": 1}
        before, after = self.opening.lstrip(), self.closing.rstrip()
        parts = [*([json.dumps(before)] if before else []), "call", *([json.dumps(after)] if after else [])]
        return f"start: {' '.join(parts)}\ncall: %json {json.dumps(schema)}\n"

    def _call(self, value: Any, names: Sequence[str]) -> ToolCall | None:
        if isinstance(value, dict) and isinstance(value.get("function"), dict):
            value = value["function"]
        if not isinstance(value, dict) or value.get("name") not in names:
            return None
        given = value.get(self.arguments, {})
        if isinstance(given, str):
            return ToolCall(value["name"], given)
        return ToolCall(value["name"], json.dumps(given, ensure_ascii=False)) if isinstance(given, dict) else None


def learn_calls(tokenizer: PreTrainedTokenizerBase) -> CallFormat | None:
    """The form in which the tokenizer's template writes an assistant's call; None if it writes none as JSON."""
    if not tokenizer.chat_template or "tool_calls" not in tokenizer.get_chat_template(tools=[_TOOL]):
        return None
    asked = Message("user", "tercelquestion")
    call = {"id": "callid123", "type": "function", "function": {"name": _NAME, "arguments": {_KEY: _VALUE}}}
    try:
        before = render_text(tokenizer, [asked], [_TOOL], prompt=True)
        whole = render_text(tokenizer, [asked, Message("assistant", "", (call,))], [_TOOL])
    except TemplateRefusalError:
        return None
    answer = whole[len(before) :] if whole.startswith(before) else whole[whole.rfind("tercelquestion") + 14 :]
    return _read_off(answer, special_texts(tokenizer))


def _read_off(answer: str, specials: Sequence[str]) -> CallFormat | None:
    """The form of the call in what a template wrote as an answer."""
    name = answer.rfind(_NAME)
    for start in (m.start() for m in re.finditer(r"[\[{]", answer[: max(name, 0)])):
        try:
            value, end = json.JSONDecoder().raw_decode(answer[start:])
        except ValueError:
            continue
        listed = isinstance(value, list)
        one = value[0] if listed and value else value
        if isinstance(one, dict) and isinstance(one.get("function"), dict):
            one = one["function"]
        keys = [key for key, item in one.items() if item == {_KEY: _VALUE}] if isinstance(one, dict) else []
        if keys and one.get("name") == _NAME:
            opening, closing = answer[:start], answer[start + end :]
            plain = not any(token in opening for token in specials)
            # what follows the end of the turn is not the answer's
            ends = [closing.find(token) for token in specials if token in closing]
            closing = closing[: min(ends)] if ends else closing
            for token in specials:
                opening = opening.replace(token, "")
            return CallFormat(opening, closing, keys[0], listed, plain)
    return None
