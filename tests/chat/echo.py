"""A responder made for tests of regeneration, and a run with it."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

from tercel.chat import Answer, Conversation, Message, Question, RegenerateSettings, regenerate

from .tokenizers_for_tests import make_tokenizer

TOKENIZER = make_tokenizer("chatml")
SETTINGS = RegenerateSettings("tiny", temperature=0.0, seed=0, max_new_tokens=8, context=200)


class Killed(BaseException):
    """What a signal does to the run."""


class Echo:
    """Answers "re: <last question>", a few at a time in random order; fails or dies where it is told to."""

    def __init__(self, seed: int = 0, *, fail: str = "", die_after: int = 10**9, finish: str = "stop"):
        self.random, self.fail, self.die_after, self.finish = random.Random(seed), fail, die_after, finish
        self.waiting: list[tuple[str, tuple[int, ...]]] = []
        self.prompts: list[str] = []
        self.most = self.made = 0

    def submit(self, key: str, question: Question) -> None:
        self.waiting.append((key, question.prompt_ids))
        self.most = max(self.most, len(self.waiting))

    def pending(self) -> int:
        return len(self.waiting)

    def generated(self) -> int:
        return self.made

    def poll(self) -> list[Answer]:
        self.random.shuffle(self.waiting)
        count = self.random.randint(1, max(1, len(self.waiting)))
        taken, self.waiting = self.waiting[:count], self.waiting[count:]
        return [self.answer(*request) for request in taken]

    def answer(self, key: str, prompt_ids: tuple[int, ...]) -> Answer:
        if self.die_after == 0:
            raise Killed
        self.die_after -= 1
        prompt = TOKENIZER.decode(prompt_ids)
        self.prompts.append(prompt)
        question = prompt.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
        if self.fail and self.fail in question:
            return Answer(key, (), "error: out of memory")
        ids = TOKENIZER(f"re: {question}<|im_end|>")["input_ids"]
        self.made += len(ids)
        return Answer(key, tuple(ids if self.finish == "stop" else ids[:-1]), self.finish)


def asks(id: str, *texts: str) -> Conversation:
    return Conversation(id, tuple(Message("user", text) for text in texts), "test")


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def run(prompts, respond, out: Path, **changes):
    return regenerate(prompts, respond, out, tokenizer=TOKENIZER, settings=replace(SETTINGS, **changes), in_flight=3)
