"""What travels through the decoding loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tercel.chat import Message, serving_prompt
from tercel.decode.draft_tree import DraftTree
from tercel.decode.generation_config import sampling_for
from tercel.decode.history import TokenConstraint
from tercel.decode.logprobs import TokenLogprob
from tercel.decode.sampling import SamplingParams
from tercel.decode.stopping import Emission
from tercel.draft.acceptance import acceptance_length, tokens_of_steps
from tercel.errors import TercelError
from tercel.target_model.output import TargetOutput
from tercel.target_model.protocol import TargetModel

if TYPE_CHECKING:
    from tercel.decode.trace import StepTrace


@dataclass(frozen=True)
class Request:
    """A prompt (token ids, not empty) and how to answer it.

    text: whether the answer's text is wanted; decoding it token by token takes time, and stop strings are found in it.
    logprobs: tell with every token how likely the target held it, and this many of the likeliest there (None: do not);
    echo: the same for the prompt. constraint: makes what else restricts this answer's tokens. traced: whether its
    events carry a record of their step, which takes time too.
    """

    prompt: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    text: bool = True
    logprobs: int | None = None
    echo: bool = False
    constraint: Callable[[], TokenConstraint] | None = None
    traced: bool = False

    @classmethod
    def chat(cls, target: TargetModel, message: str, params: SamplingParams | None = None) -> Request:
        """One user message, rendered with the target's own chat template; without `params`, decoded greedily as the
        target's generation config asks."""
        prompt = serving_prompt(target.tokenizer, [Message("user", message)])
        return cls(tuple(prompt), params or sampling_for(target))


@dataclass(frozen=True, eq=False)
class Aside:
    """`M` tokens that the target computes beside a tree and does not verify: what comes of them, in `Committed.aside`,
    is the proposer's affair.

    Each sees the text, the tree's node that it hangs `at` with that node's ancestors (left out, all hang at the root),
    and of the others what `seen` says, bool `[M, M]`, itself included. depths: how far behind the root's position
    theirs are, at least 1. numbers: what the proposer calls them, to know them by where some were left out; left out
    here, 0, 1, …
    Raises `TercelError` for sizes that do not fit each other, and for a depth below 1.
    """

    tokens: Sequence[int]
    depths: Sequence[int]
    seen: NDArray[np.bool_]
    at: Sequence[int] = ()
    numbers: Sequence[int] = ()

    def __post_init__(self) -> None:
        count = len(self.tokens)
        for name in ("at", "numbers"):
            if not len(getattr(self, name)):
                object.__setattr__(self, name, range(count) if name == "numbers" else (0,) * count)
        sizes = {len(self.depths), len(self.at), len(self.numbers), *self.seen.shape}
        if sizes != {count} or not count or min(self.depths) < 1 or not self.seen.diagonal().all():
            raise TercelError(
                f"{count} tokens beside a draft tree need as many depths, from 1 on, and a mask [{count}, {count}] in "
                f"which each sees itself, not {len(self.depths)} depths and a mask {list(self.seen.shape)}"
            )

    def __len__(self) -> int:
        return len(self.tokens)

    def only(self, wanted: Sequence[bool], nodes: Sequence[int] | None = None) -> Aside | None:
        """Those that are wanted and see only such; None if there are none. nodes: of the tree, if it is cut to them."""
        keep = np.array(wanted, dtype=bool)
        while (blind := keep & (self.seen & ~keep).any(1)).any():
            keep &= ~blind
        if keep.all() and nodes is None:
            return self
        places = np.flatnonzero(keep).tolist()
        if not places:
            return None
        new = {node: number for number, node in enumerate(nodes or range(max(self.at) + 1))}
        tokens, depths, numbers = ([of[i] for i in places] for of in (self.tokens, self.depths, self.numbers))
        return Aside(tokens, depths, self.seen[np.ix_(places, places)], [new[self.at[i]] for i in places], numbers)


@dataclass(frozen=True, eq=False)
class Proposal:
    """A draft tree.

    aside: what is to be computed beside it. distributions: for drafts that were *sampled*, the `[V]` distribution that
    the children of a node were drawn from (None: the drafts are deterministic). log_q: `[N]`, how likely the proposer
    holds each node to be if its parent is right, as a logarithm, the root's 0 (None: it does not say).
    """

    tree: DraftTree
    distributions: Callable[[int], Tensor] | None = None
    log_q: NDArray[np.float64] | None = None
    aside: Aside | None = None

    @property
    def width(self) -> int:
        """Tokens that a forward over it computes."""
        return len(self.tree) + (0 if self.aside is None else len(self.aside))

    def up_to(self, depth: int) -> Proposal:
        """Without what lies deeper. Sampled drafts stand level by level, so the nodes that stay keep their
        numbers."""
        near = self
        if self.aside is not None and max(self.aside.depths) > depth:
            near = replace(self, aside=self.aside.only([own <= depth for own in self.aside.depths]))
        return near._only([node for node, own in enumerate(self.tree.depth_list) if own <= depth])

    def best(self, chances: NDArray[np.float64], nodes: int) -> Proposal:
        """The `nodes` likeliest nodes, by the chances `[N]` of their whole paths; with every node its parent."""
        return self._only(np.sort(np.argsort(-chances, kind="stable")[:nodes]).tolist())

    def _only(self, nodes: list[int]) -> Proposal:
        if len(nodes) == len(self.tree):
            return self
        log_q = None if self.log_q is None else self.log_q[nodes]
        aside, kept = self.aside, set(nodes)
        if aside is not None:
            aside = aside.only([node in kept for node in aside.at], nodes)
        return replace(self, tree=self.tree.only(nodes), log_q=log_q, aside=aside)


@dataclass(frozen=True)
class Committed:
    """What one step made permanent for a row.

    tokens: the accepted ones and the target's own, `a + 1` of them, as far as the answer goes on.
    layers: captured features `[a + 1, K]` a layer of the root and the accepted tokens; entry `i` is the feature of
    the token before `tokens[i]`.
    aside: what came of the tokens beside the tree, as far as they were run; None if none were.
    """

    tokens: tuple[int, ...]
    layers: tuple[Tensor, ...]
    aside: AsideOutput | None = None


@dataclass(frozen=True, eq=False)
class AsideOutput:
    """numbers: which tokens of an `Aside` were run. output: what the target gave for them, `[1, M, ..]`."""

    numbers: Sequence[int]
    output: TargetOutput


@dataclass(frozen=True)
class GenerationResult:
    """A finished answer, or what there was of one that was aborted or failed.

    tokens: generated, an end token included. queried_tokens: of the prompt, that were looked for among what is kept of
    earlier requests; cached_tokens: that were found there, and not run. finish_reason: as in `Emission`. error: what
    ended it alone, while others went on; its text is one sentence for the user if it is a `TercelError`.
    prefill_seconds: from when its prompt began to run until its first token. steps: target forwards after prefill.
    accepted: accepted draft tokens of each step. nodes: tree nodes verified in all, roots included. split: seconds a
    phase of its steps (`clock.py`).
    """

    tokens: tuple[int, ...]
    text: str
    finish_reason: str
    prompt_tokens: int
    steps: int
    accepted: tuple[int, ...]
    nodes: int
    prefill_seconds: float
    decode_seconds: float
    split: dict[str, float]
    error: Exception | None = None
    queried_tokens: int = 0
    cached_tokens: int = 0

    def require(self) -> GenerationResult:
        """Itself; raises `error` if that ended the answer."""
        if self.error is not None:
            raise self.error
        return self

    @property
    def tau(self) -> float:
        """Acceptance length."""
        return acceptance_length(tokens_of_steps(self.tokens), self.steps)


@dataclass(frozen=True)
class Event:
    """One block of one request.

    index: number of the request in order of submission. drafted: how many of `emission.tokens`, from the first on,
    were accepted drafts; the others are the target's own. nodes: of the tree that was verified, root included; 0 for
    what came without one, as the first token. logprobs: of `emission.tokens`, and prompt_logprobs, with the first
    event, of the prompt but for its first token, for a request that asks for them. trace: the step's record, for one
    that asks for it, unless the step failed. result: set with the last event of a request.
    """

    index: int
    emission: Emission
    drafted: int
    nodes: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    trace: StepTrace | None = None
    result: GenerationResult | None = None
