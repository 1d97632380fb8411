"""The engine as what regenerates training answers: many requests in flight, answers as they finish."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import replace

from tercel.chat import Answer, Question
from tercel.chat.responder import SHOWN_EVERY
from tercel.decode.engine import Engine
from tercel.decode.sampling import SamplingParams
from tercel.decode.types import Request
from tercel.errors import TercelError


class EngineResponder:
    """A `Responder` over one decoding loop; the engine's slots are how many requests it works on at a time.

    With a temperature, a request's random numbers come of the seed and its prompt alone, so that neither
    order nor a resumed run changes an answer.
    """

    def __init__(self, engine: Engine, params: SamplingParams) -> None:
        self._loop = engine.loop()
        self._params = params
        self._keys: dict[int, str] = {}
        self._refused: list[Answer] = []
        self._generated = 0

    def submit(self, key: str, question: Question) -> None:
        seed = _seed_of(self._params.seed or 0, question.prompt_ids)
        request = Request(question.prompt_ids, replace(self._params, seed=seed), text=bool(self._params.stop))
        try:
            self._keys[self._loop.submit(request)] = key
        except TercelError as error:  # one prompt that does not fit must not end the run
            self._refused.append(_refused(key, error))

    def poll(self) -> list[Answer]:
        """Step until a request is finished, or a while has gone by."""
        finished, self._refused = self._refused, []
        until = time.monotonic() + SHOWN_EVERY
        while not finished and self._loop.pending:
            for event in self._loop.step():
                self._generated += len(event.emission.tokens)
                if event.result is not None:
                    key = self._keys.pop(event.index)
                    result = event.result
                    if isinstance(result.error, TercelError):
                        finished.append(_refused(key, result.error))
                    else:
                        finished.append(Answer(key, result.require().tokens, result.finish_reason))
            if time.monotonic() > until:
                break
        return finished

    def pending(self) -> int:
        return self._loop.pending + len(self._refused)

    def generated(self) -> int:
        return self._generated


def _refused(key: str, error: TercelError) -> Answer:
    return Answer(key, (), f"error:{error}")


def _seed_of(seed: int, prompt_ids: Sequence[int]) -> int:
    digest = hashlib.sha256(f"{seed} {list(prompt_ids)}".encode()).digest()
    return int.from_bytes(digest[:8], "big")
