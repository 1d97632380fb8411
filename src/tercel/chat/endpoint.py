"""Answers of a model behind an OpenAI-compatible endpoint: many requests at once, each patient with the server."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import anyio
from anyio.from_thread import start_blocking_portal

from tercel.chat.conversation import Message
from tercel.chat.records import message_of
from tercel.chat.responder import SHOWN_EVERY, Answer, Question
from tercel.errors import TercelError
from tercel.http.client import Http, HttpStatusError, SilentServerError
from tercel.http.look_up import LookUpLoop
from tercel.reading import short

_CHAT, _MODELS = "/v1/chat/completions", "/v1/models"
_PASSING = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})  # statuses that another try may not meet
_OF_ONE = frozenset({400, 413, 422})  # and those that may be due to this conversation alone
_KEYLESS = frozenset({401, 403})
_ENDS = {"stop": "stop", "length": "length", "tool_calls": "stop", "function_call": "stop"}
_SHOWN = 5  # names of models in a sentence


@dataclass(frozen=True)
class Patience:
    """How often a request is tried, and the seconds before the next try: `first`, twice as many each time up to `most`,
    a random part of them less, so that requests that failed together do not come back together.

    longest: a server that asks for a longer pause ends the run.
    """

    tries: int = 8
    first: float = 1.0
    most: float = 60.0
    longest: float = 600.0

    def pause(self, failures: int) -> float:
        """Before the next try of a request that has failed so often."""
        return min(self.most, self.first * 2 ** (failures - 1)) * random.uniform(0.5, 1.0)


@dataclass(frozen=True)
class Asking:
    """What is asked for beside the messages. seed: of the run; each request has one of its own, by its messages.
    template_arguments: what the chat template is given, by servers that let it be given anything."""

    model: str
    temperature: float
    seed: int
    max_new_tokens: int
    template_arguments: Mapping[str, Any] = field(default_factory=dict)

    def body(self, question: Question) -> dict[str, Any]:
        messages = [_to_send(message) for message in question.messages]
        body: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "max_tokens": self.max_new_tokens,
            "temperature": self.temperature,
        }
        if question.tools:
            body["tools"] = list(question.tools)
        if self.template_arguments:
            body["chat_template_kwargs"] = dict(self.template_arguments)
        if self.temperature > 0:
            digest = hashlib.sha256(f"{self.seed} {json.dumps(messages, sort_keys=True)}".encode()).digest()
            body["seed"] = int.from_bytes(digest[:4], "big") >> 1  # fits whatever integers a server has
        return body


class EndpointResponder:
    """A `Responder` over `/v1/chat/completions`: all that is submitted is asked at once. Use it as a context manager.

    A request that meets a passing fault (too many requests, a server that is down or slow) is tried again. One that the
    server does not take fails alone; where nothing would be taken (no such model, no access, nobody there any more)
    `poll` raises `TercelError`.
    """

    def __init__(self, http: Http, asking: Asking, patience: Patience | None = None) -> None:
        self._http, self._asking, self._patience = http, asking, patience or Patience()
        self._running: dict[Future[Answer], str] = {}
        self._generated = 0
        self._opened = ExitStack()

    def __enter__(self) -> EndpointResponder:
        """Raises `TercelError` if no server is there, it gives no access, or it says that it has no such model."""
        self._check_model()
        self._portal = self._opened.enter_context(
            start_blocking_portal(backend_options={"loop_factory": LookUpLoop})
        )
        self._client = self._opened.enter_context(self._portal.wrap_async_context_manager(self._http.client()))
        return self

    def __exit__(self, *raised: Any) -> None:
        for future in self._running:
            future.cancel()
        self._opened.close()

    def submit(self, key: str, question: Question) -> None:
        self._running[self._portal.start_task_soon(self._ask, key, question)] = key

    def poll(self) -> list[Answer]:
        if not self._running:
            return []
        done = wait(self._running, SHOWN_EVERY, return_when=FIRST_COMPLETED).done
        answered = [future for future in done if future.exception() is None]
        for future in answered:
            del self._running[future]
        answers = [future.result() for future in answered or done]  # what ends the run comes after what was answered
        self._generated += sum(answer.length for answer in answers)
        return answers

    def pending(self) -> int:
        return len(self._running)

    def generated(self) -> int:
        """What servers tell of finished answers."""
        return self._generated

    def _check_model(self) -> None:
        try:
            listed = self._http.get(_MODELS).get("data")
        except HttpStatusError as error:
            if error.status in _KEYLESS:
                raise _no_access(error) from error
            return  # not every server lists its models
        names = [entry.get("id") for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
        if names and self._asking.model not in names:
            known = ", ".join(short(name) for name in names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
            raise TercelError(f"{self._http.base} has no model {self._asking.model!r}; give one of {known} as --model")

    async def _ask(self, key: str, question: Question) -> Answer:
        body = self._asking.body(question)
        failed: TercelError
        for failures in range(1, self._patience.tries + 1):
            try:
                return self._answer(key, await self._http.post_with(self._client, _CHAT, body))
            except HttpStatusError as error:
                if error.status in _OF_ONE:
                    return Answer(key, (), f"error:{error}")
                if error.status in _KEYLESS:
                    raise _no_access(error) from error
                if error.status not in _PASSING:
                    raise
                failed, asked = error, error.retry_after or 0.0
            except SilentServerError as error:
                failed, asked = error, 0.0
            if asked > self._patience.longest:
                raise TercelError(f"{failed}; it asks for a pause of {asked:,.0f} s: run again then, to resume")
            if failures < self._patience.tries:
                await anyio.sleep(max(asked, self._patience.pause(failures)))
        raise TercelError(f"{failed}; so it was {self._patience.tries} times; run again later, to resume") from failed

    def _answer(self, key: str, reply: Mapping[str, Any]) -> Answer:
        """Raises `TercelError` for a reply that is none of this interface."""
        where = f"{self._http.base}{_CHAT}"
        choices = reply.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else None
        if not isinstance(choice, dict) or not isinstance(choice.get("message"), dict):
            raise TercelError(f"{where} answers without a choice with a message; is it OpenAI-compatible?")
        end = _ENDS.get(str(choice.get("finish_reason")))
        if end is None:
            return Answer(key, (), f"error:the server ended an answer with {short(choice.get('finish_reason'))}")
        try:
            said = message_of({"content": "", **choice["message"], "role": "assistant"}, where)
        except TercelError as error:
            return Answer(key, (), f"error:{error}")
        usage = reply.get("usage")
        count = usage.get("completion_tokens") if isinstance(usage, dict) else None
        length = count if type(count) is int and 0 <= count < 2**31 else 0
        return Answer(key, (), end, replace(said, name=None, tool_call_id=None), length)


def _to_send(message: Message) -> dict[str, Any]:
    """What every server takes: thoughts of earlier turns are not sent back."""
    return replace(message, reasoning_content=None).to_json()


def _no_access(error: HttpStatusError) -> TercelError:
    return TercelError(f"{error}; it wants a key: name the environment variable that holds one with --api-key-env")
