"""From the target's logits to the next token: processors, exact distribution, and a request's own randomness.

`V` is the target's vocabulary. The processors work in this order, which is Hugging Face's:

1. repetition penalty (tokens of prompt and answer), 2. presence and frequency penalty (tokens of the answer),
3. logit bias, 4. temperature, 5. top-k, 6. top-p, 7. min-p.

Token-by-token decoding and every verification rule call the functions of this file, so they cannot differ.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from tercel.errors import TercelError

# Most nuclei are far smaller, and sorting a whole vocabulary costs more than all the rest together.
NUCLEUS_START = 1024


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_finite(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True)
class SamplingParams:
    """How one request picks its tokens and when it ends.

    `temperature=0` is greedy (top-k, top-p and min-p then change nothing); `top_k=0`, `top_p=1` and `min_p=0`
    are off. `repetition_penalty` divides or multiplies as in Hugging Face; `presence_penalty` and
    `frequency_penalty` are subtracted as in OpenAI's API; `logit_bias` maps token id to an addend.
    `seed=None` draws a fresh one. `stop_token_ids` end the answer even with `ignore_eos`.

    Raises `TercelError` for a value outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    max_new_tokens: int = 256
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        def check(name: str, fine: bool, wanted: str) -> None:
            if not fine:
                value = self.__dict__[name]
                raise TercelError(f"sampling parameter {name} is {value!r}, but it must be {wanted}")

        bias, seed = self.logit_bias, self.seed
        check("temperature", _is_finite(self.temperature) and self.temperature >= 0, "at least 0 (0: greedy)")
        check("top_k", _is_id(self.top_k), "an integer of at least 0 (0: off)")
        check("top_p", _is_finite(self.top_p) and 0 < self.top_p <= 1, "above 0 and at most 1 (1: off)")
        check("min_p", _is_finite(self.min_p) and 0 <= self.min_p <= 1, "between 0 and 1 (0: off)")
        penalty = self.repetition_penalty
        check("repetition_penalty", _is_finite(penalty) and penalty > 0, "a number above 0 (1: off)")
        check("presence_penalty", _is_finite(self.presence_penalty), "a finite number (0: off)")
        check("frequency_penalty", _is_finite(self.frequency_penalty), "a finite number (0: off)")
        good_bias = all(map(_is_id, bias)) and all(map(_is_finite, bias.values()))
        check("logit_bias", good_bias, "a map from token ids to finite numbers")
        check("seed", seed is None or (_is_id(seed) and seed < 2**64), "an integer from 0 to 2**64 - 1, or none")
        check("max_new_tokens", _is_id(self.max_new_tokens) and self.max_new_tokens >= 1, "at least 1")
        good_stop = isinstance(self.stop, tuple) and all(isinstance(s, str) and s for s in self.stop)
        check("stop", good_stop, "a tuple of non-empty strings")
        good_ids = isinstance(self.stop_token_ids, tuple) and all(map(_is_id, self.stop_token_ids))
        check("stop_token_ids", good_ids, "a tuple of token ids")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


class TokenHistory:
    """The tokens of one request, with the counts that the penalties need kept up to date in O(1) per token.

    To look at a path of the draft tree, `push` its tokens and `pop` them again: nothing of size V is copied.
    The count buffers are made when a penalty first asks for them, so requests without penalties never pay for
    them.

    Raises `TercelError` if the prompt holds an id outside the vocabulary.
    """

    def __init__(self, prompt: Sequence[int], vocab_size: int, device: torch.device | str | None = None) -> None:
        for token in prompt:
            if not 0 <= token < vocab_size:
                raise TercelError(
                    f"the prompt holds token id {token}, but the target's vocabulary has "
                    f"{vocab_size} entries; use the target's own tokenizer"
                )
        self.prompt = tuple(prompt)
        self.generated: list[int] = []
        self._vocab_size = vocab_size
        self._device = torch.device(device or "cpu")
        self._counts: Tensor | None = None  # [2, V] int32; row 0: answer, row 1: prompt and answer

    @property
    def position(self) -> int:
        """Index of the next generated token: the number of those pushed so far, path included."""
        return len(self.generated)

    def push(self, token: int) -> None:
        self.generated.append(token)
        if self._counts is not None:
            self._counts[:, token] += 1

    def pop(self, count: int = 1) -> None:
        """Take back the last `count` pushed tokens."""
        if count > len(self.generated):
            raise ValueError(f"cannot pop {count} of {len(self.generated)} generated tokens")
        for _ in range(count):
            token = self.generated.pop()
            if self._counts is not None:
                self._counts[:, token] -= 1

    def generated_counts(self) -> Tensor:
        """How often each token is in the answer so far, int32 [V]; a view, not to be written to."""
        return self._count_rows()[0]

    def seen_counts(self) -> Tensor:
        """The same for prompt and answer together, int32 [V]; a view, not to be written to."""
        return self._count_rows()[1]

    def _count_rows(self) -> Tensor:
        if self._counts is None:
            answer, prompt = (
                torch.bincount(torch.tensor(ids, dtype=torch.long), minlength=self._vocab_size)
                for ids in (self.generated, self.prompt)
            )
            self._counts = torch.stack([answer, answer + prompt]).to(self._device, torch.int32)
        return self._counts


class RandomStream:
    """A request's own uniforms: the `i`-th belongs to generated token `i`, whatever was drawn before it.

    Numbers come from the counter-based Philox generator, keyed by (seed, purpose) and counted by (index,
    lane), so that cutting an accepted block or discarding a draft never shifts later ones. Lane 0 picks
    tokens; lanes 1, 2, … are the acceptance tests of `verify_sampled_drafts`. `seed=None` draws a fresh seed,
    kept in `.seed`.
    """

    def __init__(self, seed: int | None = None, purpose: int = 0) -> None:
        self.seed = secrets.randbits(64) if seed is None else seed
        self._purpose = purpose

    def uniform(self, index: int, lane: int = 0) -> float:
        """Uniform in [0, 1) with 53 random bits."""
        key = np.array([self.seed, self._purpose], dtype=np.uint64)
        counter = np.array([0, index, lane, 0], dtype=np.uint64)
        return (int(np.random.Philox(key=key, counter=counter).random_raw()) >> 11) * 2.0**-53

    def for_drafts(self) -> RandomStream:
        """An independent stream of the same seed, for proposers that sample their drafts."""
        return RandomStream(self.seed, purpose=1)


def processed_logits(logits: Tensor, params: SamplingParams, history: TokenHistory) -> Tensor:
    """Logits [V] after penalties and bias, float32 or better.

    With all of them off this may be `logits` itself: do not write to it.
    Raises `TercelError` if `logit_bias` names an id outside the vocabulary.
    """
    scores = logits if logits.dtype == torch.float64 else logits.float()
    if params.repetition_penalty != 1:
        penalty = params.repetition_penalty
        penalised = torch.where(scores > 0, scores / penalty, scores * penalty)
        scores = torch.where(history.seen_counts() > 0, penalised, scores)
    if params.presence_penalty != 0 or params.frequency_penalty != 0:
        counts = history.generated_counts()
        scores = scores - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
    if params.logit_bias:
        highest = max(params.logit_bias)
        if highest >= len(scores):
            raise TercelError(
                f"logit_bias names token id {highest}, but the target's vocabulary has {len(scores)} entries"
            )
        ids = torch.tensor(list(params.logit_bias), device=scores.device)
        addends = torch.tensor(list(params.logit_bias.values()), dtype=scores.dtype, device=scores.device)
        scores = scores.index_add(0, ids, addends)
    return scores


def target_distribution(logits: Tensor, params: SamplingParams, history: TokenHistory) -> Tensor:
    """The distribution [V] of the next token after all processors, float64, for exactly this history.

    At temperature 0 it is one-hot at `greedy_token`. Raises `TercelError` for logits with NaN or infinity.
    Ties at the border of top-k are all kept (as in Hugging Face); ties at the border of top-p are resolved
    for the lower id, so the result never depends on a kernel's whim.
    """
    if params.greedy:
        one_hot = torch.zeros(len(logits), dtype=torch.float64, device=logits.device)
        one_hot[greedy_token(logits, params, history)] = 1.0
        return one_hot
    scores = processed_logits(logits, params, history)
    _check_finite(float(scores.max()), history)
    ids = None  # the candidates' token ids [C]; None: all
    if 0 < params.top_k < len(scores):  # temperature keeps the order, so the cut may come before it
        ids = (scores >= torch.topk(scores, params.top_k).values[-1]).nonzero().squeeze(1)
        scores = scores[ids]
    scores = scores.double()
    probs = torch.softmax((scores - scores.max()) / params.temperature, dim=0)
    if params.top_p < 1:
        kept = _nucleus(probs, params.top_p)
        ids = kept if ids is None else ids[kept]
        probs = probs[kept] / probs[kept].sum()
    if params.min_p > 0:
        probs = torch.where(probs >= params.min_p * probs.max(), probs, 0.0)
        probs = probs / probs.sum()
    if ids is None:
        return probs
    return torch.zeros(len(logits), dtype=torch.float64, device=logits.device).index_copy_(0, ids, probs)


def _nucleus(probs: Tensor, top_p: float) -> Tensor:
    """Indices [C'] of the fewest, most probable entries of `probs` [C] whose mass is at least `top_p`."""
    size = NUCLEUS_START
    while True:
        if size < len(probs):
            ids = (probs >= torch.topk(probs, size).values[-1]).nonzero().squeeze(1)  # with all ties
        else:
            ids = torch.arange(len(probs), device=probs.device)
        ordered, order = torch.sort(probs[ids], descending=True, stable=True)
        mass = ordered.cumsum(0)
        short = int((mass < top_p).sum())  # so many entries do not suffice: one more is needed
        if short < len(ids) or len(ids) == len(probs):
            return ids[order[: short + 1]]
        size *= 8


def greedy_token(logits: Tensor, params: SamplingParams, history: TokenHistory) -> int:
    """Argmax of the processed logits [V]; the lowest id among equals.

    Raises `TercelError` if they hold NaN or infinity.
    """
    scores = processed_logits(logits, params, history)
    token = int(scores.argmax())  # documented to be the first of equal maxima; takes NaN for the largest
    _check_finite(float(scores[token]), history)
    return token


def _check_finite(largest: float, history: TokenHistory) -> None:
    if not math.isfinite(largest):
        raise TercelError(
            f"the target's largest logit for generated token {history.position} is {largest}; "
            "load the target in bfloat16 or float32"
        )


def sample(probs: Tensor, uniform: float) -> int:
    """Inverse-CDF draw from `probs` [V] (any positive total) with one uniform in [0, 1), in float64.

    Never returns a token of probability 0. Raises `TercelError` if the total is not positive and finite.
    """
    cdf = probs.double().cumsum(0)
    total = float(cdf[-1])
    if not 0 < total < math.inf:
        raise TercelError(f"cannot sample from probabilities that add up to {total}; were the logits finite?")
    token = min(int(torch.searchsorted(cdf, uniform * total, right=True)), len(cdf) - 1)
    if float(probs[token]) > 0:
        return token
    # Rounding put the draw on the edge of a flat stretch of the CDF; it belongs to the token that ends there.
    support = probs.nonzero().squeeze(1)
    return int(support[max(int((support <= token).sum()) - 1, 0)])


def choose_token(logits: Tensor, params: SamplingParams, history: TokenHistory, stream: RandomStream) -> int:
    """The target's token after `history`: argmax at temperature 0, else drawn with its position's uniform."""
    if params.greedy:
        return greedy_token(logits, params, history)
    return sample(target_distribution(logits, params, history), stream.uniform(history.position))
