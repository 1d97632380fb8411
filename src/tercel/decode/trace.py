"""One step of one request as a record of plain numbers: the tree, what the draft and the target thought of every node,
and how the target chose. For people who want to see it; decoding does without.

All of it is computed again, by the functions that verification itself calls, from what it was given: neither rule knows
that anybody looks on.

`N` nodes of the tree, `V` the target's vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from torch import Tensor

from tercel.decode.draft_tree import DraftTree
from tercel.decode.history import TokenHistory
from tercel.decode.sampling import RandomStream, SamplingParams, processed_logits, sample, target_distribution
from tercel.decode.types import Proposal
from tercel.decode.verify import Trial, Verdict, try_children

LIKELIEST = 5  # tokens told of each of the target's choices


@dataclass(frozen=True)
class TracedNode:
    """draft: how likely the proposer held its token behind its parent, as far as it says; target: how likely the target
    did, with the request's processors for that very path (None where they leave no distribution, and below a token that
    it would never take). The root has neither."""

    token: int
    parent: int
    draft: float | None = None
    target: float | None = None


@dataclass(frozen=True)
class Choice:
    """What the target said behind a node.

    token: what it took. probability: of that token there; at temperature 0 of the distribution that it is the likeliest
    of, at temperature 1; None where that could not be made again. likeliest: the most probable tokens with theirs.
    trials: of drafts that were drawn. uniform: the number in [0, 1) that picked the token, and span: the part of [0, 1)
    that stands for the token, in what the trials left of the distribution; None where nothing was drawn: at temperature
    0, and where a trial was accepted. lossy: whether the target would have drawn another token, which a rule of the
    method's own let pass.
    """

    node: int
    token: int
    probability: float | None
    likeliest: tuple[tuple[int, float], ...]
    trials: tuple[Trial, ...] = ()
    uniform: float | None = None
    span: tuple[float, float] | None = None
    lossy: bool = False


@dataclass(frozen=True)
class StepTrace:
    """position: index in the answer of the first token that the step yields; 0 is prefill, whose tree is its root.
    path: accepted nodes. choices: behind the root and every node of the path; the last is the target's own token.
    split: seconds a phase of the step, for all its rows together (`clock.py`); empty for prefill.
    """

    position: int
    nodes: tuple[TracedNode, ...]
    path: tuple[int, ...]
    choices: tuple[Choice, ...]
    split: Mapping[str, float] = field(default_factory=dict)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Accepted drafts and the target's own; an answer that ends may take fewer of them."""
        return tuple(choice.token for choice in self.choices)


class Traced(Protocol):
    """What a record takes of a request."""

    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def params(self) -> SamplingParams: ...
    @property
    def history(self) -> TokenHistory: ...
    @property
    def stream(self) -> RandomStream: ...
    @property
    def traced(self) -> bool: ...


def trace_rows(
    rows: Sequence[Traced], proposals: Sequence[Proposal], logits: Tensor, verdicts: Sequence[Verdict | Exception]
) -> list[StepTrace | None]:
    """The records of a step, logits `[B, N, V]`; None for a row that failed or that asks for none."""
    return [
        None
        if isinstance(verdict, Exception) or not row.traced
        else _record(row, proposal, scores[: len(proposal.tree)], verdict)
        for row, proposal, scores, verdict in zip(rows, proposals, logits, verdicts, strict=True)
    ]


def trace_first(request: Traced, logits: Tensor, token: int) -> StepTrace:
    """The record of the token that the target chose behind the prompt. logits: [V]."""
    return _record(request, Proposal(DraftTree.root_only(request.tokens[-1])), logits[None], Verdict((), (), token))


def _record(row: Traced, proposal: Proposal, logits: Tensor, verdict: Verdict) -> StepTrace:
    try:
        return trace_step(proposal, logits, verdict, row.params, row.history, row.stream)
    except Exception:  # of a constraint, whoever wrote it, that does not say the same again: told without probabilities
        nodes = tuple(map(TracedNode, proposal.tree.token_list, proposal.tree.parent_list))
        taken = zip((0, *verdict.path), verdict.tokens, strict=True)
        choices = tuple(Choice(node, token, None, ()) for node, token in taken)
        return StepTrace(row.history.position, nodes, verdict.path, choices)


def trace_step(
    proposal: Proposal,
    logits: Tensor,
    verdict: Verdict,
    params: SamplingParams,
    history: TokenHistory,
    stream: RandomStream,
) -> StepTrace:
    """The record of a verified tree. logits: [N, V], row `i` the target's after node `i`; `history` ends with the
    root's token, and is left as it was."""
    tree = proposal.tree
    target: list[float | None] = [None] * len(tree)
    for node in range(len(tree)):
        if tree.children(node) and (node == 0 or target[node]):
            with _behind(tree, node, history):
                probs = _thought(logits[node], params, history)
            for child in tree.children(node):
                target[child] = None if probs is None else float(probs[tree.token_list[child]])
    choices = []
    for node, token in zip((0, *verdict.path), verdict.tokens, strict=True):
        with _behind(tree, node, history):
            choices.append(_choice(proposal, node, token, logits[node], params, history, stream))
    nodes = zip(tree.token_list, tree.parent_list, _drafted(proposal), target, strict=True)
    return StepTrace(history.position, tuple(TracedNode(*node) for node in nodes), verdict.path, tuple(choices))


def _choice(
    proposal: Proposal,
    node: int,
    token: int,
    logits: Tensor,
    params: SamplingParams,
    history: TokenHistory,
    stream: RandomStream,
) -> Choice:
    probs = _thought(logits, params, history)
    assert probs is not None  # a token was chosen from it
    best = probs.topk(min(LIKELIEST, len(probs)))
    told = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    likeliest = tuple((other, chance) for other, chance in told if chance > 0)
    choice = Choice(node, token, float(probs[token]), likeliest)
    if params.greedy and proposal.distributions is None:
        return choice
    trials: Sequence[Trial] = ()
    left = target_distribution(logits, params, history)
    if proposal.distributions is not None:
        trials, left = try_children(proposal.tree, node, left, proposal.distributions, stream, history.position)
    if params.greedy or (trials and trials[-1].accepted):
        return replace(choice, trials=tuple(trials))
    uniform = stream.uniform(history.position)
    if sample(left, uniform) != token:
        return replace(choice, trials=tuple(trials), lossy=True)
    ends = left.cumsum(0) / left.sum()
    span = (float(ends[token - 1]) if token else 0.0, float(ends[token]))
    return replace(choice, trials=tuple(trials), uniform=uniform, span=span)


def _thought(logits: Tensor, params: SamplingParams, history: TokenHistory) -> Tensor | None:
    """What the target's next token is taken from `[V]`, float64 on the host; None where the request's rules leave
    nothing, or the logits are no numbers."""
    try:
        if not params.greedy:
            return target_distribution(logits, params, history)
        scores = processed_logits(logits, params, history).double()
    except Exception:  # of a processor, whoever wrote it, on a path that verification may never have gone
        return None
    return scores.softmax(0) if math.isfinite(float(scores.max())) else None


def _drafted(proposal: Proposal) -> list[float | None]:
    """Probabilities of the nodes behind their parents, where the proposer tells them."""
    tree = proposal.tree
    if proposal.distributions is not None:
        known: list[float | None] = [None]
        q: dict[int, Tensor] = {}
        for node in range(1, len(tree)):
            parent = tree.parent_list[node]
            if parent not in q:
                q[parent] = proposal.distributions(parent)
            known.append(float(q[parent][tree.token_list[node]] / q[parent].sum()))
        return known
    if proposal.log_q is None:
        return [None] * len(tree)
    told = np.exp(proposal.log_q[1:]).tolist()
    return [None, *(q if math.isfinite(q) else None for q in told)]


@contextmanager
def _behind(tree: DraftTree, node: int, history: TokenHistory) -> Iterator[None]:
    """The history with the path to the node."""
    path: list[int] = []
    while node:
        path.append(tree.token_list[node])
        node = tree.parent_list[node]
    pushed = 0
    try:
        for token in reversed(path):
            history.push(token)
            pushed += 1
        yield
    finally:
        history.pop(pushed)
