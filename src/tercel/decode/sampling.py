"""From the target's logits to the next token: processors, exact distribution, and a request's own randomness.

`V` is the target's vocabulary. The processors work in this order, which is Hugging Face's:

1. logit bias, 2. repetition penalty (tokens of prompt and answer), 3. presence and frequency penalty (tokens of the
answer), 4. the rules of `decode/rules.py`, 5. the request's own constraint (`TokenConstraint`), 6. temperature,
7. top-k, 8. top-p, 9. min-p.

Whatever is more than an argmax is done on the host, from one row of logits: only that row leaves the device, nothing
there waits for a number from here, and float64 is at hand (Apple's devices have none).

Token-by-token decoding and every verification rule call the functions of this file, so they cannot differ.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tercel import limits
from tercel.decode.history import TokenHistory
from tercel.decode.rules import TokenRules, is_id, is_number
from tercel.errors import TercelError
from tercel.reading import short

# Most nuclei are far smaller, and sorting a whole vocabulary costs more than all the rest together.
NUCLEUS_MOST = 256
_RARE = 1e-12  # below it all are sorted


TERM = f"between -{limits.LOGIT:g} and {limits.LOGIT:g}"
FACTOR = f"between {1 / limits.LOGIT:g} and {limits.LOGIT:g}"


def _is_term(value: object) -> bool:
    """Whether it is a number that float32 logits can be added to."""
    return is_number(value) and -limits.LOGIT <= value <= limits.LOGIT


def _is_factor(value: object) -> bool:
    """Whether it is one that they can be multiplied with, and divided by."""
    return is_number(value) and 1 / limits.LOGIT <= value <= limits.LOGIT


@dataclass(frozen=True)
class SamplingParams:
    """How one request picks its tokens and when it ends.

    `temperature=0` is greedy (top-k, top-p and min-p then change nothing); `top_k=0`, `top_p=1` and `min_p=0`
    are off. `repetition_penalty` divides or multiplies as in Hugging Face; `presence_penalty` and
    `frequency_penalty` are subtracted as in OpenAI's API; `logit_bias` maps token id to an addend.
    `seed=None` draws a fresh one. `stop_token_ids` end the answer even with `ignore_eos`. `rules` are those of a
    model's generation config, which these values say nothing of: `sampling_for` takes both over.

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
    rules: TokenRules = field(default_factory=TokenRules)

    def __post_init__(self) -> None:
        def check(name: str, fine: bool, wanted: str) -> None:
            if not fine:
                raise TercelError(f"sampling parameter {name} is {short(self.__dict__[name])}, but it must be {wanted}")

        bias, seed = self.logit_bias, self.seed
        warmth, penalty = self.temperature, self.repetition_penalty
        check("temperature", _is_term(warmth) and warmth >= 0, f"at least 0 (0: greedy) and at most {limits.LOGIT:g}")
        check("top_k", is_id(self.top_k), "an integer of at least 0 (0: off)")
        check("top_p", _is_term(self.top_p) and 0 < self.top_p <= 1, "above 0 and at most 1 (1: off)")
        check("min_p", _is_term(self.min_p) and 0 <= self.min_p <= 1, "between 0 and 1 (0: off)")
        check("repetition_penalty", _is_factor(penalty), f"{FACTOR} (1: off)")
        check("presence_penalty", _is_term(self.presence_penalty), f"{TERM} (0: off)")
        check("frequency_penalty", _is_term(self.frequency_penalty), f"{TERM} (0: off)")
        good_bias = all(map(is_id, bias)) and all(map(_is_term, bias.values()))
        check("logit_bias", good_bias, f"a map from token ids to numbers, each {TERM}")
        check("seed", seed is None or (is_id(seed) and seed < 2**64), "an integer from 0 to 2**64 - 1, or none")
        good_length = is_id(self.max_new_tokens) and 1 <= self.max_new_tokens <= limits.POSITIONS
        check("max_new_tokens", good_length, f"at least 1 and at most {limits.POSITIONS:,}")
        good_stop = isinstance(self.stop, tuple) and all(isinstance(s, str) and s for s in self.stop)
        check("stop", good_stop, "a tuple of non-empty strings")
        good_ids = isinstance(self.stop_token_ids, tuple) and all(map(is_id, self.stop_token_ids))
        check("stop_token_ids", good_ids, "a tuple of token ids")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @cached_property
    def plain(self) -> bool:
        """Whether nothing changes the order of the logits, so that the greedy token is their argmax."""
        penalties = (self.repetition_penalty - 1, self.presence_penalty, self.frequency_penalty)
        return not any(penalties) and not self.logit_bias and self.rules.off

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """The ids that end the answer, as far as the rules on its length know them."""
        return (*self.stop_token_ids, *(() if self.ignore_eos else self.rules.eos_token_ids))


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
    """Logits [V] after bias, penalties, rules and constraint, on the host, float32 or better.

    With all of them off this may be `logits` itself: do not write to it.
    Raises `TercelError` if `logit_bias` or a rule names an id outside the vocabulary.
    """
    scores = logits.cpu()
    scores = scores if scores.dtype == torch.float64 else scores.float()
    if not params.plain:
        scores = _ruled(scores, params, history)
    if history.constraint is not None:
        scores = torch.where(history.constraint.allowed(), scores, -math.inf)
    return scores


def _ruled(scores: Tensor, params: SamplingParams, history: TokenHistory) -> Tensor:
    _check_ids(params, len(scores))
    scores = _biased(scores, params, history)
    if params.repetition_penalty != 1:
        penalty = params.repetition_penalty
        penalised = torch.where(scores < 0, scores * penalty, scores / penalty)
        scores = torch.where(history.seen_counts() > 0, penalised, scores)
    if params.presence_penalty != 0 or params.frequency_penalty != 0:
        counts = history.generated_counts()
        scores = scores - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
    if params.rules.off:
        return scores
    return params.rules.restrict(scores, history, params.ends, params.max_new_tokens)


def _biased(scores: Tensor, params: SamplingParams, history: TokenHistory) -> Tensor:
    addends = [*params.logit_bias.items(), *params.rules.biases(history)]
    if not addends:
        return scores
    ids, values = zip(*addends, strict=True)
    bias = torch.zeros(len(scores)).index_add_(0, torch.tensor(ids), torch.tensor(values, dtype=torch.float32))
    return scores + bias


def _check_ids(params: SamplingParams, vocab_size: int) -> None:
    for name, highest in (("logit_bias", max(params.logit_bias, default=-1)), ("a rule", params.rules.highest_id)):
        if highest >= vocab_size:
            raise TercelError(f"{name} names token id {highest}, but the target's vocabulary has {vocab_size} entries")


def target_distribution(logits: Tensor, params: SamplingParams, history: TokenHistory) -> Tensor:
    """The distribution [V] of the next token after all processors, float64 on the host, for exactly this history.

    At temperature 0 it is one-hot at `greedy_token`. Raises `TercelError` for logits with NaN or infinity.
    Ties at the border of top-k are all kept (as in Hugging Face); ties at the border of top-p are resolved
    for the lower id, so the result never depends on a kernel's whim.
    """
    if params.greedy:
        one_hot = torch.zeros(len(logits), dtype=torch.float64)
        one_hot[greedy_token(logits, params, history)] = 1.0
        return one_hot
    scores = processed_logits(logits, params, history)
    _check_finite(float(scores.max()), params, history)
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
    return torch.zeros(len(logits), dtype=torch.float64).index_copy_(0, ids, probs)


def _nucleus(probs: Tensor, top_p: float) -> Tensor:
    """Indices [C'] of the fewest, most probable entries of `probs` [C] whose mass is at least `top_p`."""
    least = 1 / NUCLEUS_MOST
    while True:
        ids = (probs >= least).nonzero().squeeze(1)  # with all ties; no more than 1 / least of them
        ordered, order = torch.sort(probs[ids], descending=True, stable=True)
        short = int((ordered.cumsum(0) < top_p).sum())  # so many entries do not suffice: one more is needed
        if short < len(ids) or len(ids) == len(probs):
            return ids[order[: short + 1]]
        least = least / 8 if least > _RARE else 0.0


def greedy_token(logits: Tensor, params: SamplingParams, history: TokenHistory) -> int:
    """Argmax of the processed logits [V]; the lowest id among equals.

    Raises `TercelError` if they hold NaN or infinity.
    """
    token = int(best_tokens(logits if unchanged(params, history) else processed_logits(logits, params, history)))
    if token < 0:
        _check_finite(float(processed_logits(logits, params, history).max()), params, history)
    return token


def unchanged(params: SamplingParams, history: TokenHistory) -> bool:
    """Whether nothing changes the order of this request's logits, so that the greedy token is their argmax."""
    return params.plain and history.constraint is None


def best_tokens(logits: Tensor) -> Any:
    """Argmax of every row of `logits` `[.., V]` as (nested lists of) ints, the lowest id among equals; -1 for a row
    whose largest logit is not finite. Only these numbers leave the device."""
    largest, tokens = logits.max(-1)  # documented to be the first of equal maxima; takes NaN for the largest
    return torch.where(largest.isfinite(), tokens, -1).cpu().tolist()


def _check_finite(largest: float, params: SamplingParams, history: TokenHistory) -> None:
    if largest == -math.inf and not unchanged(params, history):
        raise TercelError(
            f"no token is left that could be generated token {history.position}: logit bias, the rules of the "
            "generation config and the grammar together forbid every one; leave some of them out"
        )
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
