"""What a tokenizer's own chat template does, learned by rendering it; no template's strings are written
here."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jinja2 import Environment, TemplateError
from transformers import PreTrainedTokenizerBase

from tercel import limits
from tercel.chat.conversation import REASONING, Message
from tercel.chat.deadline import DeadlineError, deadline
from tercel.chat.panics import guarded
from tercel.chat.tokenizing import tokenize
from tercel.errors import TercelError

GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")
USER_MARK, ANSWER_MARK, THOUGHT_MARK = "tercelquestion", "tercelanswer", "tercelthought"
Tools = Sequence[dict[str, Any]] | None


class TemplateRefusalError(TercelError):
    """The template cannot render these messages (order of roles, missing field, endless loop); the text says why."""


@dataclass(frozen=True)
class ChatTemplate:
    """A tokenizer's template and what was learned of it from a dummy conversation.

    header: text that the template puts between a question and its answer, as far as the model is given it.
    unprompted: text before an answer that `add_generation_prompt` does not give, though it is a header, not
    the answer ("" for nearly all templates). tail: the template's text after the last answer; end: its part
    that the model emits, up to and including the first special token ("" if there is none). empty_thought: what it
    writes before an answer without thoughts, where thoughts would stand ("" if nothing).
    """

    tokenizer: PreTrainedTokenizerBase
    header: str
    unprompted: str
    tail: str
    end: str
    empty_thought: str
    has_generation_blocks: bool

    def render(self, messages: Sequence[Message], tools: Tools = None, *, prompt: bool = False) -> str:
        """The text of `messages`, with the generation prompt if `prompt`. Raises `TemplateRefusalError`."""
        return render_text(self.tokenizer, messages, tools, prompt=prompt)

    def unthought(self, suffix: str, message: Message) -> int:
        """How many characters of `suffix` (text after a prompt) are an empty thought that the template wrote: a model
        that thinks would not emit it, and one told not to think finds it in its prompt."""
        thought = self.empty_thought
        thinks = bool(message.reasoning_content and message.reasoning_content.strip())
        spoken = _without_space(thought) in _without_space(message.content)
        return len(thought) if suffix.startswith(thought) and not thinks and not spoken else 0

    def answer_length(self, suffix: str) -> int | None:
        """How many characters of `suffix` (text after a prompt, to the conversation's end) the model emits.

        None if the suffix ends neither in the template's usual tail nor with a special token.
        """
        if suffix.endswith(self.tail) and self.tail:
            return len(suffix) - len(self.tail) + len(self.end)
        if not self.tail:
            return len(suffix)
        matches = [m for token in special_texts(self.tokenizer) for m in re.finditer(re.escape(token), suffix)]
        return max((m.end() for m in matches), default=None)


def learn_template(tokenizer: PreTrainedTokenizerBase) -> ChatTemplate:
    """Render a dummy conversation and read the header and the end of an answer off it.

    Raises `TercelError` if the tokenizer has no chat template, or one that hides what it is given.
    """
    require_template(tokenizer)
    question, answer = Message("user", USER_MARK), Message("assistant", ANSWER_MARK)
    try:
        bare = render_text(tokenizer, [question])
        prompt = render_text(tokenizer, [question], prompt=True)
        full = render_text(tokenizer, [question, answer])
    except TemplateRefusalError as error:
        raise TercelError(
            f"the chat template of {name_of(tokenizer)} cannot render a question and its answer ({error}); "
            "is it a template for chat?"
        ) from error
    if USER_MARK not in prompt or ANSWER_MARK not in full:
        raise TercelError(f"the chat template of {name_of(tokenizer)} leaves out the messages it is given; repair it")
    tail = full.rpartition(ANSWER_MARK)[2]
    end = _first_special(tokenizer, tail)
    header = prompt.rpartition(USER_MARK)[2] if prompt == bare else _after_common(bare, prompt)
    unprompted = ""
    if prompt == bare and full.startswith(prompt):
        # The template ignores add_generation_prompt: what stands before the answer may be a role header.
        lead = full[len(prompt) :].partition(ANSWER_MARK)[0]
        unprompted = lead if lead.strip() else ""
    generation = GENERATION_BLOCK.search(tokenizer.get_chat_template()) is not None
    thought = _empty_thought(tokenizer, question, prompt + unprompted, full)
    return ChatTemplate(tokenizer, header + unprompted, unprompted, tail, end, thought, generation)


def serving_prompt(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: Tools = None) -> list[int]:
    """The prompt ids, generation prompt included, that a server would send for `messages`.

    Raises `TercelError` without a chat template or for messages that it refuses.
    """
    require_template(tokenizer)
    try:
        text = render_text(tokenizer, messages, tools, prompt=True)
    except TemplateRefusalError as error:
        raise TercelError(f"the chat template of {name_of(tokenizer)} refuses the messages: {error}") from error
    return encode(tokenizer, text)


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a text that a template wrote: `apply_chat_template` adds no special tokens either."""
    return list(tokenize(tokenizer, text)["input_ids"])


def require_template(tokenizer: PreTrainedTokenizerBase) -> None:
    if not tokenizer.chat_template:
        raise TercelError(
            f'{name_of(tokenizer)} has no chat template; use a chat model, or {{"text"}} rows as plain text '
            "for a base model"
        )


def render_text(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Tools = None,
    *,
    prompt: bool = False,
) -> str:
    if not messages:
        raise TemplateRefusalError("there is no message before the answer")
    with rendering(tokenizer):
        text = tokenizer.apply_chat_template(
            template_messages(tokenizer, messages, tools),
            tools=list(tools) if tools else None,
            add_generation_prompt=prompt,
            tokenize=False,
        )
        return str(text)


@contextmanager
def rendering(tokenizer: PreTrainedTokenizerBase) -> Iterator[None]:
    """Whatever the tokenizer's template does while it renders in this block, beside succeeding, becomes a
    `TemplateRefusalError`: it raises (faulty and strict templates do), runs for ever, or fills the memory."""
    try:
        if (why := _unbounded(str(tokenizer.chat_template))) is not None:
            raise TemplateRefusalError(why)
        with deadline(limits.RENDER_SECONDS, limits.RENDER_BYTES), guarded():
            yield
    except TercelError:
        raise
    except DeadlineError as error:
        raise TemplateRefusalError(
            f"it was stopped after {limits.RENDER_SECONDS:g} seconds, or {limits.RENDER_BYTES >> 20} MiB"
        ) from error
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        plain = isinstance(error, TemplateError | TypeError | ValueError) and reason
        raise TemplateRefusalError(reason if plain else f"{type(error).__name__} {reason}".strip()) from error


_WIDE_FIELD = re.compile(r"[%{][^}A-Za-z]*\d{7}")  # '%01000000000d' and '{:>9999999999}'


@lru_cache(maxsize=8)
def _unbounded(source: str) -> str | None:
    """What of a template could be one operation without an end, which no deadline interrupts; None if nothing."""
    try:
        for _, kind, value in Environment().lex(source):
            if kind == "operator" and value == "**":
                return "it raises a number to a power, which no chat template does"
            if kind == "integer" and (len(value) > 9 or int(value) > limits.TEMPLATE_NUMBER):
                return f"it holds the number {value[:20]}, which no chat template does"
            if kind == "string" and _WIDE_FIELD.search(value):
                return f"it formats a field as wide as {value[:20]!r}, which no chat template does"
    except (TemplateError, ValueError):
        return None  # rendering tells it better
    return None


def template_messages(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: Tools = None
) -> list[dict[str, Any]]:
    """Messages as the template takes them: arguments of tool calls as objects, thoughts under the name that it reads.
    One that knows no tool calls gets them as JSON in the content."""
    source = tokenizer.get_chat_template(tools=list(tools) if tools else None)
    rows = []
    for message in messages:
        row = message.to_json()
        thought = row.pop("reasoning_content", None)
        if thought and thought.strip():
            row |= {name: thought for name in REASONING if name in source}
        if message.tool_calls:
            row["tool_calls"] = [_decoded(call) for call in message.tool_calls]
            if "tool_calls" not in source:
                calls = [json.dumps(call.get("function", call), ensure_ascii=False) for call in row.pop("tool_calls")]
                row["content"] = "\n".join([message.content, *calls] if message.content else calls)
        rows.append(row)
    return rows


def _decoded(call: dict[str, Any]) -> dict[str, Any]:
    """A tool call with its arguments as an object: APIs write them as text, templates encode them (`tojson`)."""
    if "function" in call:
        function = call["function"]
        return {**call, "function": _decoded(function)} if isinstance(function, dict) else call
    text = call.get("arguments")
    if not isinstance(text, str):
        return call
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return call  # written by a model that did not get it right: as it stands
    return {**call, "arguments": arguments} if isinstance(arguments, dict) else call


def special_texts(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Texts of the special tokens; a plain added token is not one (some tokenizers add runs of spaces)."""
    added = [str(t.content) for t in tokenizer.added_tokens_decoder.values() if t.special]
    return sorted({*added, *tokenizer.all_special_tokens} - {""})


def end_ids(template: ChatTemplate) -> set[int]:
    """Ids that end an answer: the template's end-of-turn token and the tokenizer's EOS."""
    tokenizer = template.tokenizer
    ids = {tokenizer.eos_token_id} - {None}
    if template.end:
        ids.update(encode(tokenizer, template.end)[-1:])
    return ids


def name_of(tokenizer: PreTrainedTokenizerBase) -> str:
    return str(tokenizer.name_or_path or "the tokenizer")


def _empty_thought(tokenizer: PreTrainedTokenizerBase, question: Message, before: str, full: str) -> str:
    """What `full` holds between `before` and the answer, if it is there that thoughts go, and nothing else."""
    thinking = Message("assistant", ANSWER_MARK, reasoning_content=THOUGHT_MARK)
    try:
        thought = render_text(tokenizer, [question, thinking])
    except TemplateRefusalError:
        return ""
    emptied = thought.replace(THOUGHT_MARK, "")
    if emptied == thought or _without_space(emptied) != _without_space(full) or not full.startswith(before):
        return ""
    return full[len(before) :].partition(ANSWER_MARK)[0]


def _without_space(text: str) -> str:
    return "".join(text.split())


def _first_special(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """`text` up to and including its first special token (else its first added one), or "" if it has none."""
    added = {str(token.content) for token in tokenizer.added_tokens_decoder.values()}
    for tokens in (special_texts(tokenizer), [token for token in added if token.strip()]):
        ends = [(text.find(token), -len(token)) for token in tokens if token in text]
        if ends:
            start, length = min(ends)
            return text[: start - length]
    return ""


def _after_common(shorter: str, longer: str) -> str:
    """What a generation prompt adds: `longer` from where it leaves `shorter`."""
    at = 0
    while at < min(len(shorter), len(longer)) and shorter[at] == longer[at]:
        at += 1
    return longer[at:]
