"""What a benchmark compares: the project's own engine with whatever proposer, and stock `generate()`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from transformers import GenerationConfig

from tercel.decode.sampling import SamplingParams
from tercel.decode.types import GenerationResult, Request
from tercel.errors import TercelError
from tercel.target.model import Target

NO_EOS = -1  # an id that no token has: transformers would fill a missing one in from the model


@dataclass(frozen=True)
class Run:
    """One answer of one method.

    tokens: generated ids, an end token included. seconds: wall clock of the whole call, prefill included.
    steps: target forwards after prefill. accepted, nodes, split: as in `GenerationResult`, empty where a
    method has no drafts.
    """

    tokens: tuple[int, ...]
    seconds: float
    steps: int
    accepted: tuple[int, ...] = ()
    nodes: int = 0
    split: dict[str, float] = field(default_factory=dict)


class Method(Protocol):
    """coupled: whether the same seed gives the same text as token-by-token decoding."""

    @property
    def coupled(self) -> bool: ...

    def run(self, prompt: tuple[int, ...], params: SamplingParams) -> Run: ...


class Generator(Protocol):
    """The part of `Engine` that measuring needs."""

    def generate(self, requests: Sequence[Request]) -> list[GenerationResult]: ...


@dataclass(frozen=True)
class EngineMethod:
    """The project's loop; `coupled` is False for proposers that sample their drafts."""

    engine: Generator
    coupled: bool = True

    def run(self, prompt: tuple[int, ...], params: SamplingParams) -> Run:
        started = time.perf_counter()
        result = self.engine.generate([Request(prompt, params)])[0]
        seconds = time.perf_counter() - started
        return Run(result.tokens, seconds, result.steps, result.accepted, result.nodes, dict(result.split))


@dataclass(frozen=True)
class TransformersMethod:
    """Stock `model.generate()` of the very model that the target holds, with its own `DynamicCache`.

    Sampled text differs from the engine's, whose random numbers it does not share.
    """

    target: Target
    coupled: bool = False

    def run(self, prompt: tuple[int, ...], params: SamplingParams) -> Run:
        """Raises `TercelError` for parameters that stock generation has not, or has in another sense."""
        _check_stock(params)
        self.target.tap(())  # capturing features is not part of stock generation
        device = self.target.device
        config = self._config(params, len(prompt))
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            if params.seed is not None:
                torch.manual_seed(params.seed)
            started = time.perf_counter()
            ids = torch.tensor([prompt], device=device)
            with torch.no_grad():
                output = self.target.model.generate(  # type: ignore[operator]
                    ids, attention_mask=torch.ones_like(ids), generation_config=config
                )
            tokens = tuple(output[0, len(prompt) :].tolist())
            seconds = time.perf_counter() - started
        return Run(tokens, seconds, len(tokens) - 1)

    def _config(self, params: SamplingParams, prompt_tokens: int) -> GenerationConfig:
        ends = list(params.stop_token_ids)
        if not params.ignore_eos:
            ends += self.target.eos_token_ids
        sampling = (
            {
                "temperature": params.temperature,
                "top_k": params.top_k,
                "top_p": params.top_p,
                "min_p": params.min_p or None,
            }
            if not params.greedy
            else {}
        )
        return GenerationConfig(
            max_new_tokens=min(params.max_new_tokens, self.target.context_length - prompt_tokens),
            do_sample=not params.greedy,
            repetition_penalty=params.repetition_penalty,
            eos_token_id=ends or NO_EOS,
            pad_token_id=ends[0] if ends else 0,
            use_cache=True,
            **sampling,
        )


def _check_stock(params: SamplingParams) -> None:
    unsupported = {
        "presence_penalty": params.presence_penalty != 0,
        "frequency_penalty": params.frequency_penalty != 0,
        "logit_bias": bool(params.logit_bias),
        "stop": bool(params.stop),
    }
    for name, used in unsupported.items():
        if used:
            raise TercelError(
                f"stock generation cannot be compared with {name} set; leave out the method transformers or {name}"
            )
