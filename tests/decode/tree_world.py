"""A tiny world in which a verification rule can be compared with the exact joint distribution.

The vocabulary has 6 tokens; the target's logits depend on the last two tokens and the position, the draft
knows only the last token. A run's first three tokens are one of 216 outcomes; their exact probabilities come
from `target_distribution`; RUNS runs with seeds 0, 1, … are compared with them by chi-square.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import accumulate

import pytest
import torch
from scipy.stats import chi2

from tercel.decode.draft_tree import DraftTree
from tercel.decode.history import TokenHistory
from tercel.decode.sampling import (
    RandomStream,
    SamplingParams,
    choose_token,
    target_distribution,
)
from tercel.decode.verify import Verdict, verify, verify_sampled_drafts

V = 6
PROMPT = [0, 3]
LENGTH = 3
RUNS = 1000
WIDTHS = (4, 4)

_rng = torch.Generator().manual_seed(11)
TARGET = torch.randn(8, V, V, V, generator=_rng) * 1.5  # logits by position, last but one token, last token
DRAFT = (torch.randn(V, V, generator=_rng) * 3).softmax(-1)  # distribution by last token
DRAFT_ROWS: list[list[float]] = DRAFT.tolist()

SETTINGS = {
    "plain": SamplingParams(temperature=1.0),
    "cut": SamplingParams(temperature=0.8, top_k=5, top_p=0.85, min_p=0.02),
    "penalties": SamplingParams(
        temperature=1.3,
        repetition_penalty=1.5,
        presence_penalty=0.6,
        frequency_penalty=0.7,
        logit_bias={2: 1.0, 4: -0.5},
    ),
}

Rule = Callable[[SamplingParams, TokenHistory, RandomStream], Verdict]


def target_logits(tokens: list[int]) -> torch.Tensor:
    return TARGET[len(tokens) % 8, tokens[-2], tokens[-1]]


def new_history(generated: list[int] | tuple[int, ...] = ()) -> TokenHistory:
    history = TokenHistory(PROMPT, V)
    for token in generated:
        history.push(token)
    return history


def tree_logits(tree: DraftTree, before_root: list[int]) -> torch.Tensor:
    """The target's logits [N, V] after every node; `before_root` are all tokens ahead of the root's."""
    rows = []
    for node in range(len(tree)):
        path = []
        at = node
        while at >= 0:
            path.append(tree.token_list[at])
            at = tree.parent_list[at]
        rows.append(target_logits(before_root + path[::-1]))
    return torch.stack(rows)


def grow(root: int, widths: tuple[int, ...], pick: Callable[[int, int, int], list[int]]) -> DraftTree:
    """A tree with `widths[d]` children per node of depth `d`; `pick(node, token, width)` names them."""
    tokens, parents, level = [root], [-1], [0]
    for width in widths:
        below = []
        for node in level:
            for token in pick(node, tokens[node], width):
                below.append(len(tokens))
                tokens.append(token)
                parents.append(node)
        level = below
    return DraftTree(torch.tensor(tokens), torch.tensor(parents))


@cache
def top_tree(root: int, widths: tuple[int, ...]) -> DraftTree:
    return grow(root, widths, lambda _, token, width: DRAFT[token].topk(width).indices.tolist())


@cache
def top_tree_and_logits(
    position: int, before: int, root: int, widths: tuple[int, ...]
) -> tuple[DraftTree, torch.Tensor]:
    tree = top_tree(root, widths)
    return tree, tree_logits(tree, [0] * (position - 2) + [before])


def sampled_tree(root: int, widths: tuple[int, ...], stream: RandomStream, position: int) -> DraftTree:
    """Children drawn from DRAFT without replacement, one after another."""

    def pick(node: int, token: int, width: int) -> list[int]:
        rest, drawn = list(DRAFT_ROWS[token]), []
        for lane in range(width):
            left = stream.uniform(position, 8 * node + lane) * sum(rest)
            cdf = accumulate(rest)
            drawn.append(next(t for t, mass in enumerate(cdf) if mass > left))
            rest[drawn[-1]] = 0.0
        return drawn

    return grow(root, widths, pick)


def deterministic_rule(params: SamplingParams, history: TokenHistory, stream: RandomStream) -> Verdict:
    tree, logits = top_tree_and_logits(*place(history), WIDTHS)
    return verify(tree, logits, params, history, stream)


def place(history: TokenHistory) -> tuple[int, int, int]:
    """Number of tokens so far, and the last two: all that the target and the draft look at."""
    tokens = [*PROMPT, *history.generated]
    return len(tokens), tokens[-2], tokens[-1]


def sampled_rule(widths: tuple[int, ...]) -> Rule:
    def rule(params: SamplingParams, history: TokenHistory, stream: RandomStream) -> Verdict:
        tokens = [*PROMPT, *history.generated]
        tree = sampled_tree(tokens[-1], widths, stream.for_drafts(), history.position)
        logits = tree_logits(tree, tokens[:-1])
        return verify_sampled_drafts(tree, logits, DRAFT[tree.tokens], params, history, stream)

    return rule


def generate(rule: Rule, params: SamplingParams, seed: int, length: int = LENGTH) -> tuple[int, ...]:
    history, stream = new_history(), RandomStream(seed)
    while history.position < length:
        for token in rule(params, history, stream).tokens:
            history.push(token)
    return tuple(history.generated[:length])


def one_by_one(params: SamplingParams, history: TokenHistory, stream: RandomStream) -> Verdict:
    token = choose_token(target_logits([*PROMPT, *history.generated]), params, history, stream)
    return Verdict((), (), token)


def exact_joint(params: SamplingParams) -> dict[tuple[int, ...], float]:
    joint = {}
    for outcome in itertools.product(range(V), repeat=LENGTH):
        probability = 1.0
        for index, token in enumerate(outcome):
            history = new_history(outcome[:index])
            logits = target_logits([*PROMPT, *outcome[:index]])
            probability *= float(target_distribution(logits, params, history)[token])
            if not probability:
                break
        joint[outcome] = probability
    assert sum(joint.values()) == pytest.approx(1)
    return joint


def p_value(rule: Rule, params: SamplingParams) -> float:
    """Of RUNS runs against the exact joint."""
    return chi_square([generate(rule, params, seed) for seed in range(RUNS)], exact_joint(params))


def chi_square(outcomes: Sequence[tuple[int, ...]], joint: Mapping[tuple[int, ...], float]) -> float:
    """p-value of `outcomes` under their exact probabilities (0 for what is not listed); those expected less than 5
    times share a cell."""
    counts, runs = Counter(outcomes), len(outcomes)
    if any(joint.get(outcome, 0.0) == 0 for outcome in counts):
        return 0.0  # an impossible outcome needs no statistics
    cells: dict[tuple[int, ...], list[float]] = {}
    for outcome, probability in joint.items():
        cell = cells.setdefault(outcome if runs * probability >= 5 else (), [0.0, 0.0])
        cell[0] += counts[outcome]
        cell[1] += runs * probability
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in cells.values() if expected)
    return float(chi2.sf(statistic, len(cells) - 1))


RULES = {
    "top-K tree": deterministic_rule,
    "sampled chain": sampled_rule((1, 1)),
    "siblings": sampled_rule((3, 1)),
}
