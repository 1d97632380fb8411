"""Tasks: named sets of questions, read from JSONL files, and the prompts made of them."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from tercel.chat import Conversation, Message, serving_prompt
from tercel.chat.readers import json_lines
from tercel.chat.records import parse_record
from tercel.chat.tokenizing import tokenize
from tercel.errors import TercelError

DEMO = "demo"
SUBFOLDERS = ("", "eval", "extra", "eval/extra", "robust")  # of every data folder, in this order
Tools = tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class Question:
    """User turns, asked one after another and answered in turn; `system` None means the template's
    default."""

    id: str
    turns: tuple[str, ...]
    system: str | None = None
    tools: Tools | None = None


@dataclass(frozen=True)
class Task:
    """A named set of questions, at least one."""

    name: str
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class Prompt:
    """Token ids that a target is asked with; `id` is `task/question`."""

    id: str
    tokens: tuple[int, ...]


def parse_tasks(spec: str, folders: Sequence[Path]) -> tuple[Task, ...]:
    """`"gsm8k:10,demo"`: tasks by name or file, in order.

    Raises `TercelError` as `load_task`, and for a task named twice.
    """
    tasks = tuple(load_task(part.strip(), folders) for part in spec.split(",") if part.strip())
    if not tasks:
        raise TercelError(f"no task is named in {spec!r}; give for example {DEMO}, or gsm8k:20,humaneval:20")
    names = [task.name for task in tasks]
    for name in names:
        if names.count(name) > 1:
            raise TercelError(f"task {name} is named twice in {spec!r}; name each task once")
    return tasks


def load_task(spec: str, folders: Sequence[Path]) -> Task:
    """Load `NAME_OR_FILE[:N]`; with `:N` only the first N questions.

    A name stands for `NAME.jsonl` in one of `folders` or their `SUBFOLDERS`; `demo` is built in. A file may be gzipped.
    A line is `{"turns": [..]}` (evaluation sets), `{"messages": [..]}` (user turns are asked; what follows a tool's
    answer is left out) or `{"prompt": ".."}`.

    Raises `TercelError` for an unknown name, a malformed line (with its number), an empty file or `N` out of
    range.
    """
    name, count = _split_count(spec)
    path = _find(name, folders)
    rows, where = (_built_in(), f"built-in task {DEMO}") if path is None else (json_lines(path), str(path))
    title = name if path is None else Path(path.name.removesuffix(".gz")).stem
    questions = tuple(_question(row, f"{where}, line {number}", f"{title}-{number}") for number, row in rows)
    if not questions:
        raise TercelError(f'{where} holds no question; expected lines such as {{"turns": ["…"]}}')
    task = Task(title, questions)
    return task if count is None else _first(task, count)


def question_messages(question: Question, answers: Sequence[str] = ()) -> tuple[Message, ...]:
    """The conversation up to turn `len(answers)`, whose answer is wanted."""
    messages = [] if question.system is None else [Message("system", question.system)]
    for turn, answer in zip(question.turns, answers, strict=False):
        messages += [Message("user", turn), Message("assistant", answer)]
    return (*messages, Message("user", question.turns[len(answers)]))


def prompt_ids(tokenizer: PreTrainedTokenizerBase, question: Question, answers: Sequence[str] = ()) -> tuple[int, ...]:
    """What a server would send for turn `len(answers)`: the chat template's prompt, or for a tokenizer
    without a template the texts so far, two line ends apart.

    Raises `TercelError` for messages that the template refuses.
    """
    messages = question_messages(question, answers)
    if tokenizer.chat_template:
        return tuple(serving_prompt(tokenizer, messages, question.tools))
    text = "\n\n".join(message.content for message in messages)
    return tuple(tokenize(tokenizer, text, special_tokens=True)["input_ids"])


def first_prompts(tokenizer: PreTrainedTokenizerBase, tasks: Sequence[Task]) -> tuple[Prompt, ...]:
    """The first turn of every question."""
    return tuple(
        Prompt(f"{task.name}/{question.id}", prompt_ids(tokenizer, question))
        for task in tasks
        for question in task.questions
    )


def _split_count(spec: str) -> tuple[str, int | None]:
    name, colon, count = spec.rpartition(":")
    if not colon or os.path.isfile(spec):
        return spec, None
    if not re.fullmatch(r"[0-9]{1,9}", count) or int(count) < 1:
        raise TercelError(f"{spec!r}: {count!r} is not a number of questions; write NAME:N with N of at least 1")
    return name, int(count)


def _find(name: str, folders: Sequence[Path]) -> Path | None:
    """The file that `name` stands for; None for the built-in task."""
    if os.path.isfile(name):
        return Path(name)
    if name == DEMO:
        return None
    if name.endswith(".jsonl") or "/" in name:
        raise TercelError(f"there is no task file {name}; give the path of a JSONL file, or a task's name")
    places = [folder / sub for folder in folders for sub in SUBFOLDERS]
    found = next((path for place in places if os.path.isfile(path := place / f"{name}.jsonl")), None)
    if found is not None:
        return found
    known = sorted({DEMO, *(path.stem for place in places for path in place.glob("*.jsonl"))})
    near = difflib.get_close_matches(name, known, n=1)
    advice = f"did you mean {near[0]}?" if near else "name one of these, or a JSONL file"
    looked = ", ".join(map(str, folders)) or "no data folder"
    raise TercelError(f"there is no task {name} in {looked} (found: {', '.join(known)}); {advice}")


def _built_in() -> Iterator[tuple[int, Any]]:
    text = (files("tercel.measure") / "demo_prompts.jsonl").read_text("utf-8")
    return ((number, json.loads(line)) for number, line in enumerate(text.splitlines(), 1))


def _question(row: Any, where: str, default_id: str) -> Question:
    if isinstance(row, dict) and "prompt" in row and not {"turns", "messages", "conversations"} & row.keys():
        # only asked, never shown: a completion beside it plays no part
        row = {**{key: value for key, value in row.items() if key != "prompt"}, "turns": [row["prompt"]]}
    record = parse_record(row, where=where, default_id=default_id, default_source="")
    if not isinstance(record, Conversation):
        raise TercelError(f'{where}: no question found; expected the key "turns", "messages" or "prompt"')
    system, turns = None, []
    for message in record.messages:
        if message.role == "system":
            system = message.content
        elif message.role == "user":
            turns.append(message.content)
        elif message.role == "tool":
            break
    if not any(turn.strip() for turn in turns):
        raise TercelError(f"{where}: the question is empty; give at least one user turn")
    return Question(record.id, tuple(turns), system, record.tools)


def _first(task: Task, count: int) -> Task:
    total = len(task.questions)
    if count > total:
        raise TercelError(f"task {task.name} has {total} questions, not the {count} asked for; lower the number")
    return replace(task, questions=task.questions[:count])
