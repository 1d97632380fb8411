"""What a benchmark compares: the project's own engine with whatever proposer, and stock `generate()`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase, StoppingCriteria, StoppingCriteriaList

from tercel import limits
from tercel.decode.sampling import SamplingParams
from tercel.decode.stopping import StopChecker
from tercel.decode.types import GenerationResult, Request
from tercel.errors import TercelError
from tercel.target_model.model import Target

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
    """coupled: whether the same seed gives the same text as token-by-token decoding. lossy: the rule that changes the
    text, if one does."""

    @property
    def coupled(self) -> bool: ...
    @property
    def lossy(self) -> str | None: ...

    def run(self, prompt: tuple[int, ...], params: SamplingParams) -> Run: ...


class Generator(Protocol):
    """The part of `Engine` that measuring needs."""

    def generate(self, requests: Sequence[Request]) -> list[GenerationResult]: ...


@dataclass(frozen=True)
class EngineMethod:
    """The project's loop; `coupled` is False for proposers that sample their drafts, and for lossy ones. rehearse: what
    has to be done with the requests before their time begins. lossy: the rule that changes the text, if one does."""

    engine: Generator
    coupled: bool = True
    rehearse: Callable[[Sequence[Request]], None] = lambda requests: None
    lossy: str | None = None

    def run(self, prompt: tuple[int, ...], params: SamplingParams) -> Run:
        return self.run_together([prompt], [params])[0]

    def run_together(self, prompts: Sequence[tuple[int, ...]], params: Sequence[SamplingParams]) -> list[Run]:
        """Answers made as many at a time as the engine has slots; each has an equal share of the seconds."""
        requests = [Request(*asked) for asked in zip(prompts, params, strict=True)]
        self.rehearse(requests)
        started = time.perf_counter()
        results = self.engine.generate(requests)
        share = (time.perf_counter() - started) / len(results)
        return [Run(r.tokens, share, r.steps, r.accepted, r.nodes, dict(r.split)) for r in results]


@dataclass(frozen=True)
class TransformersMethod:
    """Stock `model.generate()` of the very model that the target holds, with its own `DynamicCache`.

    Sampled text differs from the engine's, whose random numbers it does not share.
    """

    target: Target
    coupled: bool = False
    lossy: str | None = None

    def run(self, prompt: tuple[int, ...], params: SamplingParams) -> Run:
        """Raises `TercelError` for parameters that stock generation has not, or has in another sense."""
        _check_stock(params)
        device = self.target.device
        config = self._config(params, len(prompt))
        stops = StoppingCriteriaList([_StopStrings(params, self.target.tokenizer, len(prompt))] if params.stop else [])
        forked = torch.random.fork_rng([device] if device.type == "cuda" else [], device_type=device.type)
        with self._neutral(), forked:
            if params.seed is not None:
                torch.manual_seed(params.seed)
            started = time.perf_counter()
            ids = torch.tensor([prompt], device=device)
            with torch.no_grad():
                output = self.target.model.generate(  # type: ignore[operator]
                    ids, attention_mask=torch.ones_like(ids), generation_config=config, stopping_criteria=stops
                )
            tokens = tuple(output[0, len(prompt) :].tolist())
            seconds = time.perf_counter() - started
        return Run(tokens, seconds, len(tokens) - 1)

    @contextmanager
    def _neutral(self) -> Iterator[None]:
        """The model without its own generation config: `generate()` fills in from there what it is not given."""
        model = self.target.model
        own, model.generation_config = model.generation_config, GenerationConfig()
        try:
            yield
        finally:
            model.generation_config = own

    def _config(self, params: SamplingParams, prompt_tokens: int) -> GenerationConfig:
        """The very parameters, in the words of transformers."""
        ends = list(params.stop_token_ids)
        if not params.ignore_eos:
            ends += self.target.eos_token_ids
        room, rules = self.target.context_length - prompt_tokens, params.rules
        values: dict[str, Any] = {}
        if not params.greedy:
            warmth = max(float(params.temperature), 1 / limits.LOGIT)  # stock generation divides in float32
            drawn = {"temperature": warmth, "top_p": params.top_p, "min_p": params.min_p}
            values = {"do_sample": True, "top_k": params.top_k, **drawn}
        bias: dict[tuple[int, ...], float] = {ids: float(value) for ids, value in rules.sequence_bias}
        bias.update({(token,): float(value) for token, value in params.logit_bias.items()})
        bad_words = [list(ids) for ids in rules.bad_words_ids if len(ids) > 1 or ids[0] not in ends]
        if params.max_new_tokens <= room:  # else the context ends the answer, not the limit
            values["forced_eos_token_id"] = list(rules.forced_eos_token_id) or None
        if ends:
            values["exponential_decay_length_penalty"] = rules.exponential_decay_length_penalty
        return GenerationConfig(
            max_new_tokens=min(params.max_new_tokens, room),
            repetition_penalty=float(params.repetition_penalty),
            sequence_bias=bias or None,
            no_repeat_ngram_size=rules.no_repeat_ngram_size,
            bad_words_ids=bad_words or None,
            min_length=rules.min_length,
            min_new_tokens=rules.min_new_tokens or None,
            forced_bos_token_id=rules.forced_bos_token_id,
            remove_invalid_values=rules.remove_invalid_values,
            suppress_tokens=list(rules.suppress_tokens) or None,
            begin_suppress_tokens=list(rules.begin_suppress_tokens) or None,
            renormalize_logits=rules.renormalize_logits,
            eos_token_id=ends or NO_EOS,
            pad_token_id=ends[0] if ends else 0,
            use_cache=True,
            **values,
        )


class _StopStrings(StoppingCriteria):
    """Stop strings as the project's own loop finds them; those of transformers are also found in the prompt."""

    def __init__(self, params: SamplingParams, tokenizer: PreTrainedTokenizerBase, prompt_tokens: int) -> None:
        endless = replace(params, stop_token_ids=(), ignore_eos=True)  # all else is stock generation's
        self._checker = StopChecker(endless, (), tokenizer)
        self._seen = prompt_tokens

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        fresh, self._seen = input_ids[0, self._seen :].tolist(), input_ids.shape[1]
        if self._checker.finish_reason is None:
            self._checker.feed(fresh)
        stopped = self._checker.finish_reason == "stop"
        return torch.full((1,), stopped, dtype=torch.bool, device=input_ids.device)


def _check_stock(params: SamplingParams) -> None:
    unsupported = {
        "presence_penalty": params.presence_penalty != 0,
        "frequency_penalty": params.frequency_penalty != 0,
    }
    for name, used in unsupported.items():
        if used:
            raise TercelError(
                f"stock generation cannot be compared with {name} set; leave out the method transformers or {name}"
            )
