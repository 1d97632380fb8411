"""Conversations -> token ids and the mask of the assistant's tokens, through the tokenizer's own template.

The rule is that training sees what serving sees. The ids before an answer are exactly `serving_prompt` of the
turns before it; a turn for which the template cannot give that is left out and counted. A template that
rewrites earlier turns once more follow (thoughts are stripped, say) gives one `TokenizedChat` for each such
turn.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from tercel.chat.conversation import Conversation, Message, RawText, TokenizedChat
from tercel.chat.template import (
    ChatTemplate,
    TemplateRefusalError,
    encode,
    end_ids,
    learn_template,
    name_of,
    rendering,
    serving_prompt,
    template_messages,
)
from tercel.chat.tokenizing import detokenize, tokenize
from tercel.errors import TercelError

NO_ANSWER = "no assistant turn"
UNASKED = "no question comes before the answer"
REFUSED = "the chat template refuses the messages"
UNLIKE_SERVING = "the template renders the answer unlike the serving prompt"
NO_END = "the answer's end cannot be found in the template's text"
MERGED = "the answer's beginning changes the prompt's tokens"
NOT_TEMPLATE = "the text does not follow the chat template"


@dataclass(frozen=True)
class Rendered:
    """What became of a conversation: its token rows, supervised turns, and dropped turns by reason."""

    chats: tuple[TokenizedChat, ...]
    turns: int
    dropped_turns: Counter[str]
    refusal: str = ""


@dataclass
class _Carrier:
    """A text that holds answers as serving would have them; `spans[turn]`: range of characters, in order."""

    id: str
    text: str
    messages: tuple[Message, ...] = ()
    tools: tuple[dict[str, Any], ...] | None = None
    spans: dict[int, tuple[int, int]] = field(default_factory=dict)


class Renderer:
    """Renders for one tokenizer; the template is examined once, when this is made. last_turn: only what the assistant
    says after the last question is supervised, calls of tools included; earlier answers are context.

    Raises `TercelError` if the tokenizer has no chat template or cannot give character offsets.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, last_turn: bool = False):
        if not tokenizer.is_fast:
            raise TercelError(
                f"{name_of(tokenizer)} is a slow tokenizer without character offsets; load its fast version"
            )
        self.tokenizer, self.last_turn = tokenizer, last_turn
        self.template: ChatTemplate = learn_template(tokenizer)
        self._ends = end_ids(self.template)

    def render(self, conversation: Conversation) -> Rendered:
        """Token rows of a conversation; the last answer's row has its id, others add `#turnN` (N from 1)."""
        conversation, unasked = _from_first_question(conversation)
        answers = self._answers(conversation.messages)
        if not answers:
            return Rendered((), 0, unasked)
        if self._ids_known(conversation, answers):
            return self._from_ids(conversation, answers, unasked)
        carriers, dropped, refusal = self._carriers(conversation, answers)
        rows = [self._tokenize(carrier, conversation.id) for carrier in reversed(carriers)]  # oldest first
        chats = tuple(chat for row in rows for chat in row.chats)
        return Rendered(
            chats,
            sum(row.turns for row in rows),
            sum((row.dropped_turns for row in rows), dropped + unasked),
            refusal,
        )

    def _answers(self, messages: Sequence[Message]) -> list[int]:
        """Which messages are answers to learn from."""
        answers = [i for i, message in enumerate(messages) if message.role == "assistant"]
        if not self.last_turn or not answers:
            return answers
        before = enumerate(messages[: answers[-1]])
        asked = max((i for i, message in before if message.role not in ("assistant", "tool")), default=-1)
        return [i for i in answers if i > asked]

    def _carriers(self, conversation: Conversation, answers: list[int]) -> tuple[list[_Carrier], Counter[str], str]:
        """Texts that hold every answer as serving has it, the latest first (an answer's text holds older
        ones)."""
        carriers: list[_Carrier] = []
        dropped: Counter[str] = Counter()
        refusal = ""
        for turn, at in reversed(list(enumerate(answers, 1))):
            before, upto = conversation.messages[:at], conversation.messages[: at + 1]
            try:
                prompt = self.template.render(before, conversation.tools, prompt=True)
                full = self.template.render(upto, conversation.tools)
            except TemplateRefusalError as error:
                dropped[REFUSED] += 1
                refusal = str(error)
                continue
            start = len(prompt) + len(self.template.unprompted)
            if not full.startswith(prompt) or not full.startswith(self.template.unprompted, len(prompt)):
                dropped[UNLIKE_SERVING] += 1
                continue
            start += self.template.unthought(full[start:], conversation.messages[at])
            length = self.template.answer_length(full[start:])
            if not length:
                dropped[NO_END] += 1
                continue
            end = start + length
            if not carriers or not carriers[-1].text.startswith(full[:end]):
                id = conversation.id if turn == len(answers) else f"{conversation.id}#turn{turn}"
                carriers.append(_Carrier(id, full, upto, conversation.tools))
            carriers[-1].spans = {turn: (start, end), **carriers[-1].spans}
        return carriers, dropped, refusal

    def _tokenize(self, carrier: _Carrier, base_id: str) -> Rendered:
        """Tokenise the whole text once and map the spans onto tokens.

        The tokens before an answer must be those of the prompt alone, else the row is not what serving sees.
        It is checked from the end of the answer before: an end-of-turn token splits a text for good. An
        answer that changes the prompt's tokens (line ends on both sides, say) gets a row of its own.
        """
        encoding = tokenize(self.tokenizer, carrier.text, offsets=True)
        tokens = list(encoding["input_ids"])
        ends = _running_max([end for _, end in encoding["offset_mapping"]])
        blocks = self.template.has_generation_blocks and bool(carrier.messages)
        allowed = self._generation_mask(carrier, tokens) if blocks else [True] * len(tokens)
        supervised = [False] * len(tokens)
        own_rows: list[TokenizedChat] = []
        kept, char, token = 0, 0, 0
        for turn, (start, end) in carrier.spans.items():
            first, last = _tokens_within(ends, start), _tokens_within(ends, end)
            after_last = encode(self.tokenizer, carrier.text[char:start]) == tokens[token:first]
            if after_last or encode(self.tokenizer, carrier.text[:start]) == tokens[:first]:
                supervised[first:last] = allowed[first:last]
                kept += 1
            elif not blocks:
                id = carrier.id if len(carrier.spans) == 1 else f"{base_id}#turn{turn}"
                own_rows += self._own_row(id, carrier.text[:start], carrier.text[start:end])
            char, token = end, last
        whole = [TokenizedChat.of(carrier.id, tokens, supervised)] if kept else []
        turns = kept + len(own_rows)
        return Rendered((*own_rows, *whole), turns, +Counter({MERGED: len(carrier.spans) - turns}))

    def _own_row(self, id: str, prompt: str, answer: str) -> list[TokenizedChat]:
        """The prompt's ids and the answer's, or [] if the tokenizer cannot tokenise the answer apart."""
        head, tail = encode(self.tokenizer, prompt), encode(self.tokenizer, answer)
        together = encode(self.tokenizer, prompt + answer)
        if detokenize(self.tokenizer, head + tail) != detokenize(self.tokenizer, together):
            return []  # such as a SentencePiece model, which puts a space before every text
        return [TokenizedChat.of(id, head + tail, [False] * len(head) + [True] * len(tail))]

    def _generation_mask(self, carrier: _Carrier, tokens: list[int]) -> list[bool]:
        """`[T]` what a template's own `{% generation %}` blocks allow; end-of-turn tokens are always
        allowed."""
        with rendering(self.tokenizer):
            out: Any = self.tokenizer.apply_chat_template(
                template_messages(self.tokenizer, carrier.messages, carrier.tools),
                tools=list(carrier.tools) if carrier.tools else None,
                return_dict=True,
                return_assistant_tokens_mask=True,
                tokenizer_kwargs={"verbose": False},
            )
            return [bool(m) or token in self._ends for m, token in zip(out["assistant_masks"], tokens, strict=True)]

    def _ids_known(self, conversation: Conversation, answers: list[int]) -> bool:
        """Whether every answer has the ids the target generated, and they are this tokenizer's."""
        for at in answers:
            message = conversation.messages[at]
            ids = message.token_ids
            if not ids or max(ids) >= len(self.tokenizer) or answer_text(self.tokenizer, ids) != message.content:
                return False
        return True

    def _from_ids(self, conversation: Conversation, answers: list[int], unasked: Counter[str]) -> Rendered:
        """Rows of prompt ids and generated ids; a row goes on as long as the next prompt begins with it."""
        rows: list[tuple[str, list[int], list[bool]]] = []
        for turn, at in enumerate(answers, 1):
            generated = list(conversation.messages[at].token_ids or ())
            try:
                prompt = serving_prompt(self.tokenizer, conversation.messages[:at], conversation.tools)
            except TercelError as error:
                return Rendered((), 0, unasked + Counter({REFUSED: len(answers)}), str(error))
            mask = [False] * len(prompt)
            if rows and prompt[: len(rows[-1][1])] == rows[-1][1]:
                earlier = rows.pop()[2]
                mask[: len(earlier)] = earlier
            id = conversation.id if turn == len(answers) else f"{conversation.id}#turn{turn}"
            rows.append((id, prompt + generated, mask + [True] * len(generated)))
        return Rendered(tuple(TokenizedChat.of(*row) for row in rows), len(answers), unasked)

    def render_text(self, raw: RawText) -> Rendered:
        """A preformatted text: an answer is what stands between the template's header and its end of turn.

        Raises `TercelError` if the template has no header or no end that could be looked for.
        """
        header, end = self.template.header, self.template.end
        if not header.strip() or not end.strip():
            raise TercelError(
                f"the chat template of {name_of(self.tokenizer)} marks answers by no header and end token; "
                f'they cannot be found in the preformatted text {raw.id}; give "messages" instead'
            )
        carrier = _Carrier(raw.id, self._with_bos(raw.text))
        at = carrier.text.find(header)
        while at >= 0:
            start = at + len(header)
            close = carrier.text.find(end, start)
            stop = len(carrier.text) if close < 0 else close + len(end)
            if stop > start:
                carrier.spans[len(carrier.spans) + 1] = (start, stop)
            at = carrier.text.find(header, stop)
        if not carrier.spans:
            return Rendered((), 0, Counter({NOT_TEMPLATE: 1}), f"no {header!r} in it")
        if self.last_turn:
            carrier.spans = dict([carrier.spans.popitem()])
        return self._tokenize(carrier, raw.id)

    def _with_bos(self, text: str) -> str:
        """`text` with the BOS that the template starts with: without it the target's features are off."""
        bos = self.tokenizer.bos_token
        rendered = self.template.render([Message("user", "x")])
        return bos + text if bos and rendered.startswith(bos) and not text.startswith(bos) else text


def render_plain(tokenizer: PreTrainedTokenizerBase, raw: RawText) -> TokenizedChat:
    """Plain text for a base model: every token but the first is supervised."""
    tokens = list(tokenize(tokenizer, raw.text, special_tokens=True)["input_ids"])
    return TokenizedChat.of(raw.id, tokens, [i > 0 for i in range(len(tokens))])


def answer_text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """The text of generated ids, as a server returns it: without special tokens."""
    return detokenize(tokenizer, ids, skip_special=True)


def _from_first_question(conversation: Conversation) -> tuple[Conversation, Counter[str]]:
    """Without the answers that stand before any question (data sets cut long conversations into pieces)."""
    messages = conversation.messages
    first = next((i for i, m in enumerate(messages) if m.role not in ("system", "assistant")), len(messages))
    head = tuple(message for message in messages[:first] if message.role == "system")
    if len(head) == first:
        return conversation, Counter()
    return replace(conversation, messages=head + messages[first:]), Counter({UNASKED: first - len(head)})


def _running_max(ends: list[int]) -> list[int]:
    result, highest = [], 0
    for end in ends:
        highest = max(highest, end)
        result.append(highest)
    return result


def _tokens_within(ends: list[int], char: int) -> int:
    """How many tokens end at or before `char`."""
    return bisect_left(ends, char + 1)
