"""What an engine's driver speaks: a job comes in, then prompts; answers go out. One JSON object a line.

    {"target": …, "method": …, …}                                       → {"version": …, "settings": {…}}
    {"prompt": […], "max_new_tokens": 64, "temperature": 0, "seed": 0}  → {"tokens": […], "seconds": 1.2, …}

`{"error": …}` is the last line of a driver that cannot go on; it ends by itself when nothing more comes in. All that an
engine prints goes to standard error. Runs inside the engines' environments, so it needs nothing but Python's own
library; the other end is `engine_process.py`.

A job says: target, head (None without), method ("vanilla", "lookup", "eagle3"; what else an engine has is said there),
dtype ("float32", "bfloat16"), k (drafted tokens a step), context (longest sequence), threads, eos (ids that end an
answer); `engine_files.py` adds what one engine alone needs.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

Job = dict[str, Any]
PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>


@dataclass(frozen=True)
class Question:
    """prompt: token ids. Penalties and all else of the model's generation config play no part."""

    prompt: list[int]
    max_new_tokens: int
    temperature: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Answer:
    """tokens: generated, the end token included. seconds: of the generating call, prompt included. steps: runs of the
    target after the prompt's. drafts: how many drafts it verified. accepted: how many of them were right at position
    0, 1, … at least. None is what the engine does not tell, or does not do."""

    tokens: list[int]
    seconds: float
    steps: int | None = None
    drafts: int | None = None
    accepted: list[int] | None = None


class Loaded:
    """A loaded engine. settings: what a reader has to know of how it runs beside the job."""

    version: str
    settings: dict[str, Any]

    def answer(self, question: Question) -> Answer:
        raise NotImplementedError

    def close(self) -> None:
        """Stops what it started."""


def end_with_parent() -> None:
    """Let the kernel kill this process, paused or not, when the one that started it has gone. Linux only."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def replying() -> Callable[[dict[str, Any]], None]:
    """Ties this process to the one that started it; what says a reply as a line. What else is printed goes to standard
    error."""
    end_with_parent()
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(reply: dict[str, Any]) -> None:
        replies.write(json.dumps(reply) + "\n")
        replies.flush()

    return say


def serve(load: Callable[[Job], Loaded]) -> None:
    """Load what the first line asks for and answer every further line."""
    say = replying()
    try:
        engine = load(json.loads(sys.stdin.readline()))
        try:
            say({"version": engine.version, "settings": engine.settings})
            for line in sys.stdin:
                say(asdict(engine.answer(Question(**json.loads(line)))))
        finally:
            engine.close()
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        say({"error": " ".join(str(error).split())[:500] or type(error).__name__})
        sys.exit(1)
