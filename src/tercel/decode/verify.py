"""Lossless verification: walk the draft tree as far as the target agrees (spec section 9).

`N` nodes of the tree, `V` the target's vocabulary. Both rules look only at the nodes they visit, process each
with the history of its own path, and leave the history as they found it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from tercel.decode.draft_tree import DraftTree
from tercel.decode.history import TokenHistory
from tercel.decode.sampling import (
    RandomStream,
    SamplingParams,
    choose_token,
    sample,
    target_distribution,
)
from tercel.errors import TercelError


@dataclass(frozen=True)
class Verdict:
    """What one target forward yields.

    path: the accepted nodes in order, root excluded. accepted: their tokens. own: the target's own token after the
    last of them: the *recovered* token where other tokens were drafted there (with sampled drafts it is drawn from what
    their rejection leaves), the *bonus* token where the path ends in a leaf.
    """

    path: tuple[int, ...]
    accepted: tuple[int, ...]
    own: int

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens to append: the accepted ones and the target's own; never empty."""
        return (*self.accepted, self.own)


class LossyRule(Protocol):
    """A way to verify drafts that changes the text, for comparisons with methods that do.

    title: what outputs call it.
    """

    title: str

    def verify(
        self, tree: DraftTree, logits: Tensor, params: SamplingParams, history: TokenHistory, stream: RandomStream
    ) -> Verdict:
        """As `verify`, in its own way."""
        ...


def verify(
    tree: DraftTree,
    logits: Tensor,
    params: SamplingParams,
    history: TokenHistory,
    stream: RandomStream,
    best: Sequence[int] | None = None,
) -> Verdict:
    """Verify drafts that were chosen deterministically: take the target's token, descend while it is a child.

    logits: [N, V], row `i` the target's after node `i`. `history` ends with the root's token. best: `best_tokens` of
    the logits of a greedy, `plain` request, where the caller has them for many trees at once.

    The token at every position is the one that decoding without a draft takes with the same seed, so this
    rule is not only exact in distribution: it yields the same text.
    """
    _check_rows(tree, logits)

    def decide(node: int) -> tuple[int, int | None]:
        known = -1 if best is None else best[node]
        token = known if known >= 0 else choose_token(logits[node], params, history, stream)
        return token, tree.child(node, token)

    return _walk(tree, history, decide)


def verify_sampled_drafts(
    tree: DraftTree,
    logits: Tensor,
    draft_distributions: Tensor | Callable[[int], Tensor],
    params: SamplingParams,
    history: TokenHistory,
    stream: RandomStream,
) -> Verdict:
    """Verify drafts that were sampled: rejection, recursive over siblings (arXiv 2302.01318, 2305.09781).

    logits: [N, V], row `i` the target's after node `i`. draft_distributions: [N, V], or a function of the
    node giving [V]: the distribution over the *target's* vocabulary that the node's children were really
    drawn from, without replacement and in the order of their indices, with randomness that `stream` does not
    share (see `RandomStream.for_drafts`). Which of the drawn siblings are in the tree must not depend on what
    was drawn.

    Raises `TercelError` if a child has probability 0 under its distribution: then it was not drawn from it.
    """
    _check_rows(tree, logits)
    if isinstance(draft_distributions, Tensor) and draft_distributions.shape != logits.shape:
        raise TercelError(
            f"draft distributions have shape {tuple(draft_distributions.shape)} but the target's logits "
            f"{tuple(logits.shape)}; scatter them over the target's vocabulary first"
        )

    def decide(node: int) -> tuple[int, int | None]:
        p = target_distribution(logits[node], params, history)
        trials, p = try_children(tree, node, p, draft_distributions, stream, history.position)
        if trials and trials[-1].accepted:
            child = trials[-1].child
            return tree.token_list[child], child
        return sample(p, stream.uniform(history.position)), None

    return _walk(tree, history, decide)


@dataclass(frozen=True)
class Trial:
    """A drawn child put to the test. target, draft: its probabilities by then, its siblings before it rejected."""

    child: int
    target: float
    draft: float
    uniform: float

    @property
    def accepted(self) -> bool:
        """With min(1, target / draft)."""
        return self.uniform * self.draft < self.target


def try_children(
    tree: DraftTree,
    node: int,
    p: Tensor,
    draft_distributions: Tensor | Callable[[int], Tensor],
    stream: RandomStream,
    position: int,
) -> tuple[list[Trial], Tensor]:
    """The trials of a node's children, one after another until one is accepted, and the target's distribution [V] that
    is left once those before it are rejected; at first it is `p`. The rest as in `verify_sampled_drafts`."""
    trials: list[Trial] = []
    children = tree.children(node)
    if children:
        given = draft_distributions
        q = (given[node] if isinstance(given, Tensor) else given(node)).to(p)
        q = q / q.sum()
    for lane, child in enumerate(children, start=1):
        token = tree.token_list[child]
        trial = Trial(child, float(p[token]), float(q[token]), stream.uniform(position, lane))
        if not trial.draft > 0:
            raise TercelError(
                f"node {child} of the draft tree holds token {token}, which has probability {trial.draft} "
                "under the distribution it is said to have been drawn from; pass the distribution really used, "
                "and draw siblings without replacement"
            )
        trials.append(trial)
        if trial.accepted:
            break
        p, q = reject(p, q, token)
    return trials, p


def reject(p: Tensor, q: Tensor, token: int) -> tuple[Tensor, Tensor]:
    """Target and draft distribution [V] that hold after `token`, drawn from `q`, was rejected.

    The target's is `norm(max(0, p - q))`, with the whole of `q`, not only its value at `token`; the next
    sibling's is `q` without `token`, renormalised.
    """
    residual = (p - q).clamp_(min=0)
    mass = residual.sum()
    if float(mass) > 0:  # else p equals q up to rounding, and so did the chance to come here equal 0
        p = residual / mass
    rest = q.clone()
    rest[token] = 0
    return p, rest / rest.sum()


def _walk(tree: DraftTree, history: TokenHistory, decide: Callable[[int], tuple[int, int | None]]) -> Verdict:
    """From the root, let `decide(node)` give the next token and the child that holds it, until none does."""
    path: list[int] = []
    accepted: list[int] = []
    node = 0
    try:
        while True:
            token, child = decide(node)
            if child is None:
                return Verdict(tuple(path), tuple(accepted), token)
            path.append(child)
            accepted.append(token)
            history.push(token)
            node = child
    finally:
        history.pop(len(accepted))


def _check_rows(tree: DraftTree, logits: Tensor) -> None:
    if logits.ndim != 2 or len(logits) != len(tree):
        raise TercelError(f"a draft tree of {len(tree)} nodes needs logits [{len(tree)}, V], not {tuple(logits.shape)}")
