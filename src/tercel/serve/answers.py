"""Answers in the shapes of OpenAI's interface: whole, and as the pieces of a stream."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from transformers import PreTrainedTokenizerBase

from tercel.chat.tokenizing import detokenize
from tercel.decode.logprobs import TokenLogprob
from tercel.decode.types import Event, GenerationResult
from tercel.explain.page import step_html
from tercel.explain.steps import Narrator
from tercel.serve.asked import Job
from tercel.serve.schema import Asking, ChatRequest, CompletionRequest
from tercel.serve.tokens import TokenTexts
from tercel.serve.tools import ToolCall

Json = dict[str, Any]


@dataclass
class _Choice:
    """One answer so far. sent: characters of its text that a stream has had. narrator: tells its steps, where somebody
    wants to see them."""

    narrator: Narrator | None
    text: str = ""
    sent: int = 0
    tokens: list[int] = field(default_factory=list)
    told: list[TokenLogprob] = field(default_factory=list)
    prompt_told: tuple[TokenLogprob, ...] = ()
    calls: list[ToolCall] = field(default_factory=list)
    result: GenerationResult | None = None


class Writer:
    """Makes the JSON of one request's answers; a subclass for each kind of request."""

    whole: ClassVar[str]
    piece: ClassVar[str]
    prefix: ClassVar[str]

    def __init__(self, asked: Asking, job: Job, model: str, tokenizer: PreTrainedTokenizerBase) -> None:
        self.asked, self.job, self.tokenizer, self.texts = asked, job, tokenizer, TokenTexts(tokenizer)
        self._head = {"id": self.prefix + secrets.token_hex(12), "created": int(time.time()), "model": model}
        self._choices = [_Choice(Narrator(tokenizer, r.params.stop) if r.traced else None) for r in job.requests]

    def take(self, number: int, event: Event) -> list[Json]:
        """Note what became known of an answer; the chunks of a stream that tell it."""
        choice = self._choices[number]
        first = not choice.tokens
        self.note(number, event)
        return [self._chunk(number, part) for part in self._parts(choice, event, first)]

    def note(self, number: int, event: Event) -> None:
        """What became known of an answer, for its body."""
        choice = self._choices[number]
        choice.text += event.emission.text
        choice.tokens += event.emission.tokens
        choice.told += event.logprobs
        choice.prompt_told = choice.prompt_told or event.prompt_logprobs
        choice.result = event.result

    def body(self) -> Json:
        """All answers, when they have ended."""
        choices = [{"index": number, **self._answer(choice)} for number, choice in enumerate(self._choices)]
        return {**self._head, "object": self.whole, "choices": choices, **self._more(), "usage": self.usage}

    def last(self) -> list[Json]:
        """What a stream ends with."""
        if self.asked.stream_options is None or not self.asked.stream_options.include_usage:
            return []
        return [{**self._head, "object": self.piece, "choices": [], "usage": self.usage}]

    @property
    def usage(self) -> Json:
        """Tokens of prompts and answers. Cached are those of prompts that were there before this request; what its
        later choices have of the first is not counted. Accepted and rejected are draft tokens that the target
        verified: those that are part of the answer, and all others."""
        results = [choice.result for choice in self._choices if choice.result is not None]
        prompt = sum(map(len, self.job.prompts))
        answer = sum(self._length(choice) for choice in self._choices)
        first = [choice.result for choice in self._choices[:: self.asked.n or 1] if choice.result is not None]
        cached = sum(result.cached_tokens for result in first)
        accepted = sum(sum(result.accepted) for result in results)
        drafted = sum(result.nodes - result.steps for result in results)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": answer,
            "total_tokens": prompt + answer,
            "prompt_tokens_details": {"cached_tokens": cached, "audio_tokens": 0},
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": drafted - accepted,
                "reasoning_tokens": 0,
                "audio_tokens": 0,
            },
        }

    def _chunk(self, number: int, part: Json) -> Json:
        chunk = {**self._head, "object": self.piece, "choices": [{"index": number, **part}], **self._more()}
        if self.asked.stream_options is not None and self.asked.stream_options.include_usage:
            chunk["usage"] = None
        return chunk

    def _seen(self, choice: _Choice, event: Event) -> Json:
        """What a client may ask for beside a piece of text."""
        more: Json = {"token_ids": list(event.emission.tokens)} if self.asked.return_token_ids else {}
        step = None if choice.narrator is None else choice.narrator.of(event)
        if step is not None:
            more["trace"] = {**step.to_json(), "html": step_html(step)}
        return more

    def _length(self, choice: _Choice) -> int:
        return len(choice.tokens)

    def _more(self) -> Json:
        return {}

    def _parts(self, choice: _Choice, event: Event, first: bool) -> list[Json]:
        """Of a stream: what the event adds to a choice, an object a chunk."""
        raise NotImplementedError

    def _answer(self, choice: _Choice) -> Json:
        raise NotImplementedError


class ChatWriter(Writer):
    whole, piece, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"
    asked: ChatRequest

    def _parts(self, choice: _Choice, event: Event, first: bool) -> list[Json]:
        parts: list[Json] = []
        if first:
            parts.append(self._part({"role": "assistant", "content": ""}))
        text, more = self._new_text(choice), self._seen(choice, event)
        logprobs = [self.texts.chat_entry(one) for one in event.logprobs]
        if text or logprobs or more:
            parts.append({**self._part({"content": text} if text else {}, logprobs), **more})
        if choice.result is not None:
            calls = [{"index": place, **call.to_json()} for place, call in enumerate(choice.calls)]
            if calls:
                parts.append(self._part({"tool_calls": calls}))
            parts.append({**self._part({}), "finish_reason": _reason(choice)})
        return parts

    def _new_text(self, choice: _Choice) -> str:
        """Text to send now; what may become calls is held until the answer's end, which finds them."""
        until = len(choice.text)
        if choice.result is not None:
            content = self._find_calls(choice)
            until = max(choice.sent, len(content)) if choice.calls else until
        elif self.job.calls is not None:
            start = self.job.calls.starts(choice.text)
            until = until if start is None else len(choice.text[:start].rstrip())
        new, choice.sent = choice.text[choice.sent : until], max(choice.sent, until)
        return new

    def _find_calls(self, choice: _Choice) -> str:
        content, choice.calls = choice.text, []
        if self.job.calls is not None:
            content, choice.calls = self.job.calls.read(choice.text, self.job.tools)
        return content

    def _answer(self, choice: _Choice) -> Json:
        content = self._find_calls(choice)
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if choice.calls:
            message |= {"content": content or None, "tool_calls": [call.to_json() for call in choice.calls]}
        told = [self.texts.chat_entry(one) for one in choice.told]
        logprobs = {"content": told, "refusal": None} if self.asked.logprobs else None
        answer = {"message": message, "logprobs": logprobs, "finish_reason": _reason(choice)}
        return answer | ({"token_ids": choice.tokens} if self.asked.return_token_ids else {})

    def _part(self, delta: Json, logprobs: list[Json] | None = None) -> Json:
        told = {"content": logprobs, "refusal": None} if logprobs else None
        return {"delta": delta, "logprobs": told, "finish_reason": None}

    def _more(self) -> Json:
        return {"prompt_token_ids": list(self.job.prompts[0])} if self.asked.return_token_ids else {}


class CompletionWriter(Writer):
    whole, piece, prefix = "text_completion", "text_completion", "cmpl-"
    asked: CompletionRequest

    def _parts(self, choice: _Choice, event: Event, first: bool) -> list[Json]:
        start, emission = choice.sent, event.emission
        text, ids, told = self._wanted(choice, emission.text, emission.tokens, event.logprobs, first)
        logprobs = None if self.asked.logprobs is None else self.texts.completion_entries(told, ids, start)
        choice.sent = start + sum(len(self.texts.text(token)) for token in ids) if logprobs else 0
        reason = None if choice.result is None else _reason(choice)
        part = {"text": text, "logprobs": logprobs, "finish_reason": reason, **self._seen(choice, event)}
        return [part] if text or ids or reason else []

    def _answer(self, choice: _Choice) -> Json:
        text, ids, told = self._wanted(choice, choice.text, choice.tokens, choice.told, True)
        logprobs = None if self.asked.logprobs is None else self.texts.completion_entries(told, ids, 0)
        answer: Json = {"text": text, "logprobs": logprobs, "finish_reason": _reason(choice)}
        if self.asked.return_token_ids:
            prompt = self._prompt_of(choice)[1]
            answer |= {"token_ids": choice.tokens, "prompt_token_ids": prompt}
        return answer

    def _wanted(
        self, choice: _Choice, text: str, ids: Sequence[int], told: Sequence[TokenLogprob], first: bool
    ) -> tuple[str, list[int], list[TokenLogprob | None]]:
        """What is told of an answer: nothing where no token was asked for; and before the first of it, the prompt where
        that is to be repeated."""
        if self.asked.max_tokens == 0:
            text, ids, told = "", (), ()
        if not (first and self.asked.echo):
            return text, list(ids), list(told)
        shown, before = self._prompt_of(choice)
        return shown + text, [*before, *ids], [None, *choice.prompt_told, *told]

    def _prompt_of(self, choice: _Choice) -> tuple[str, list[int]]:
        """As a text, the client's own if it gave one, and as ids."""
        place = next(number for number, one in enumerate(self._choices) if one is choice) // (self.asked.n or 1)
        given, ids = self.asked.prompt, list(self.job.prompts[place])
        if isinstance(given, str):
            return given, ids
        one = given[place] if given else None
        return one if isinstance(one, str) else detokenize(self.tokenizer, ids, clean_up=False), ids

    def _length(self, choice: _Choice) -> int:
        return 0 if self.asked.max_tokens == 0 else len(choice.tokens)


def writer_of(asked: Asking, job: Job, model: str, tokenizer: PreTrainedTokenizerBase) -> Writer:
    kind = ChatWriter if isinstance(asked, ChatRequest) else CompletionWriter
    return kind(asked, job, model, tokenizer)


def _reason(choice: _Choice) -> str:
    assert choice.result is not None
    return "tool_calls" if choice.calls else choice.result.finish_reason
