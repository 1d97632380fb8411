"""The target's own answers to a set of prompts, turn by turn in context; can be killed and resumed at any
time.

A head learns to predict what the target says, so training answers are the target's (spec section 7).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from tercel.chat import dates
from tercel.chat.answering import ENDS, Answering, answer_of
from tercel.chat.conversation import Conversation
from tercel.chat.identity import template_digest
from tercel.chat.part_file import TEMPLATE, append_line, appending, claim, drop_if_empty, finish, finished_ids
from tercel.chat.prompts import batched, with_unique_ids, without
from tercel.chat.render import answer_text
from tercel.chat.responder import Answer, Question, Responder
from tercel.chat.template import require_template, serving_prompt
from tercel.errors import TercelError
from tercel.files import is_stream, require_free
from tercel.locks import beside, one_at_a_time

TOO_LONG = "the prompt exceeds the context"
NO_QUESTION = "no user turn"
EMPTY = "an answer without tokens came back"


@dataclass(frozen=True)
class RegenerateSettings:
    """What the answers depend on; a file begun with other settings is not continued.

    `context`: the most prompt tokens of a request, i.e. the context length less room for the answer. `sampling`: what
    else decides which tokens are taken, in words. `template_arguments`: what the chat template is given beside the
    messages (None: nothing). Behind an endpoint the target is a name there, and the context the server's affair (None).
    """

    target: str
    temperature: float
    seed: int
    max_new_tokens: int
    context: int | None
    sampling: str = ""
    template_arguments: dict[str, Any] | None = None


@dataclass(frozen=True)
class RegenerateReport:
    """Counts in conversations: `answered + failed + skipped == read`.

    `done_before` of the skipped were in the file already and `elsewhere` in others; `reasons` counts the other skipped
    and the failed ones. `turns` and `tokens` are what this run answered; `cut` turns of them reached the token limit.
    made: tokens of answers that go on included; tokens_left: about how many are still to be made, None before the first
    answer. rendered_at: what the template took for now in all answers of the file, if it writes the date.
    """

    read: int
    answered: int
    failed: int
    skipped: int
    done_before: int
    elsewhere: int
    turns: int
    tokens: int
    cut: int
    made: int = 0
    tokens_left: float | None = None
    reasons: dict[str, int] = field(default_factory=dict)
    rendered_at: datetime | None = None


def regenerate(
    prompts: Iterable[Conversation],
    respond: Responder,
    out_path: Path,
    *,
    tokenizer: PreTrainedTokenizerBase | None,
    settings: RegenerateSettings,
    in_flight: int = 64,
    answered: Collection[str] = (),
    on_progress: Callable[[RegenerateReport], None] | None = None,
) -> RegenerateReport:
    """Answer every user turn of `prompts` in context and write `messages` JSONL to `out_path`.

    Assistant and tool turns of the source are discarded; user turns in a row are answered each in turn. Lines
    go to `out_path` + ".part" as conversations finish, and that file is renamed at the end; beside it,
    `.settings.json` keeps the settings, digests of the prompts and of the chat template and, where that writes
    the date, the moment that all prompts are rendered for. Conversations already in the part file are skipped,
    failed ones are not written (a resumed run tries them again). Each line has `finish` ("stop" or "length") and
    `answer_ids` (the generated ids) per answer. Prompts of like length are asked together.

    tokenizer: the target's, with its template; None for a responder that renders and answers with text: lines then have
    no `answer_ids`. in_flight: conversations at a time. answered: ids of prompts that are left out, since another file
    has them.

    Raises `TercelError` if `out_path` exists or another process writes it, if the part file was begun with other
    prompts, other settings or another chat template, if a line of it is none that such a run wrote (other than a
    torn last one), and if nothing at all was answered.
    """
    if tokenizer is not None:
        require_template(tokenizer)
    if in_flight < 1:
        raise TercelError(f"at least 1 conversation must be in flight, got {in_flight}")
    if is_stream(out_path):
        raise TercelError(f"{out_path} is not a file, and a run resumes from one; give another --out")
    out = Path(os.path.realpath(out_path))  # a link stays, and what it points to is written
    read = with_unique_ids(prompts)
    if not read:
        raise TercelError("there are no prompts to answer")
    conversations = without(read, answered)
    if not conversations:
        raise TercelError(f"all of the {len(read)} prompts are answered in other files; nothing is left to do")
    part = out.with_name(out.name + ".part")
    with one_at_a_time(beside(out, "lock"), out_path):
        require_free(out)
        began = dates.this_moment() if tokenizer and dates.writes_date(tokenizer) else None
        asked_with = {**asdict(settings), TEMPLATE: tokenizer and template_digest(tokenizer)}
        began = claim(part, out, conversations, asked_with, began)
        dated = dates.as_of(tokenizer, began) if tokenizer and began else tokenizer
        try:
            job = _Job(respond, dated, settings, in_flight, on_progress)
            job.read, job.elsewhere = len(read), len(read) - len(conversations)
            _answer(job, conversations, part)
        except TercelError:
            drop_if_empty(part, out)
            raise
        finish(part, out)
    return replace(job.report(), rendered_at=began)


def _answer(job: _Job, conversations: list[Conversation], part: Path) -> None:
    """Answer what the part file lacks. Raises `TercelError` if nothing at all was answered."""
    finished = finished_ids(part, conversations, job.text_of)
    left = without(conversations, finished)
    job.done_before = len(conversations) - len(left)
    with appending(part) as out:
        job.run(batched(left, job.in_flight), lambda row: append_line(out, row))
    report = job.report()
    if not report.answered and not report.done_before:
        reason = max(report.reasons, key=lambda name: report.reasons[name], default="no reason given")
        raise TercelError(f"none of the {len(conversations)} conversations was answered: {reason}")


def _questions(conversation: Conversation) -> int:
    return sum(message.role == "user" for message in conversation.messages)


class _Job:
    """Up to `in_flight` conversations at a time; an answer is followed by the next user turn's request."""

    def __init__(
        self,
        respond: Responder,
        tokenizer: PreTrainedTokenizerBase | None,
        settings: RegenerateSettings,
        in_flight: int,
        on_progress: Callable[[RegenerateReport], None] | None,
    ):
        self.respond, self.tokenizer, self.settings = respond, tokenizer, settings
        self.in_flight, self.on_progress = in_flight, on_progress
        self.text_of = None if tokenizer is None else partial(answer_text, tokenizer)
        self.running: dict[str, Answering] = {}
        self.read = self.answered = self.failed = self.skipped = self.done_before = self.elsewhere = 0
        self.turns = self.tokens = self.cut = self.to_ask = 0
        self.reasons: Counter[str] = Counter()

    def run(self, conversations: list[Conversation], write: Callable[[dict[str, Any]], None]) -> None:
        """Ask them in this order; `write` gets the row of each that is answered."""
        self.write = write
        self.to_ask = sum(_questions(conversation) for conversation in conversations)
        waiting = iter(conversations)
        exhausted = False
        while not exhausted or self.running:
            while not exhausted and len(self.running) < self.in_flight:
                conversation = next(waiting, None)
                exhausted = conversation is None
                if conversation is not None:
                    self._begin(conversation)
            if not self.running:
                continue
            answers = self.respond.poll()
            if not answers and not self.respond.pending():
                raise TercelError(
                    f"the responder returned nothing with {len(self.running)} conversations unanswered; "
                    "the part file keeps what is done; run again to resume"
                )
            for answer in answers:
                self._take(answer)
            if self.on_progress is not None:
                self.on_progress(self.report())

    def _begin(self, conversation: Conversation) -> None:
        state = Answering.of(conversation)
        if state is None:
            self._skip(conversation, NO_QUESTION)
            return
        self.running[conversation.id] = state
        self._ask(conversation.id)

    def _ask(self, key: str) -> None:
        """Submit the next user turn of a conversation, or close it if there is none or it does not fit."""
        state = self.running[key]
        context = state.asked()
        if context is None:
            self._close(key)
            return
        prompt: list[int] = []
        try:
            if self.tokenizer is not None:
                prompt = serving_prompt(self.tokenizer, context, state.source.tools)
        except TercelError as error:
            self._fail(key, str(error))
            return
        if self.settings.context is not None and len(prompt) > self.settings.context:
            if state.finish:
                self._close(key)  # earlier turns are answered: keep them
            else:
                del self.running[key]
                self._skip(state.source, TOO_LONG)
            return
        state.ask(context)
        self.respond.submit(key, Question(tuple(context), state.source.tools, tuple(prompt)))

    def _take(self, answer: Answer) -> None:
        state = self.running.get(answer.key)
        if state is None:
            raise TercelError(f"the responder answered {answer.key!r}, which was not asked or is already answered")
        if answer.finish.startswith("error:"):
            self._fail(answer.key, answer.finish.removeprefix("error:").strip())
            return
        if answer.finish not in ENDS:
            raise TercelError(f'unknown finish {answer.finish!r}; a responder says "stop", "length" or "error:…"')
        if self.text_of is not None and answer.token_ids:
            said = answer_of(answer.token_ids, self.text_of)
        elif answer.said is not None and (answer.said.content or answer.said.tool_calls):
            said = answer.said
        else:
            self._fail(answer.key, EMPTY)
            return
        state.take(said, answer.finish)
        self.turns += 1
        self.to_ask -= 1
        self.tokens += len(answer.token_ids) or answer.length
        self.cut += answer.finish == "length"
        self._ask(answer.key)

    def _close(self, key: str) -> None:
        state = self.running.pop(key)
        self.write(state.row())
        self.answered += 1
        self.to_ask -= _questions(state.source) - len(state.finish)  # those that the context had no room for

    def _fail(self, key: str, reason: str) -> None:
        state = self.running.pop(key)
        self.to_ask -= _questions(state.source) - len(state.finish)
        self.failed += 1
        self.reasons[reason] += 1

    def _skip(self, source: Conversation, reason: str) -> None:
        self.to_ask -= _questions(source)
        self.skipped += 1
        self.reasons[reason] += 1

    def _tokens_left(self) -> float | None:
        """Those of all questions that are not answered, less what is made of them.

        The mean length of answers is all that was made over how many have ended: those that have are the short ones
        at first. None is longer than the limit.
        """
        if not self.turns:
            return None
        made = self.respond.generated()
        mean = min(made / self.turns, self.settings.max_new_tokens)
        return max(0.0, self.to_ask * mean - max(0, made - self.tokens))

    def report(self) -> RegenerateReport:
        return RegenerateReport(
            read=self.read,
            answered=self.answered,
            failed=self.failed,
            skipped=self.skipped + self.done_before + self.elsewhere,
            done_before=self.done_before,
            elsewhere=self.elsewhere,
            turns=self.turns,
            tokens=self.tokens,
            cut=self.cut,
            made=self.respond.generated(),
            tokens_left=self._tokens_left(),
            reasons=dict(self.reasons),
        )
