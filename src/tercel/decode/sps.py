"""Speculative sampling with a second, smaller model (arXiv 2211.17192, 2302.01318): any causal language model that has
the target's tokenizer.

At temperature 0 it drafts its own likeliest tokens, a chain or a tree that grows as a head's does. Above, its drafts
are drawn from its distribution at the request's temperature, top-k, top-p and min-p, and verified by `min(1, p/q)`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tercel.decode.clock import PhaseClock
from tercel.decode.draft_tree import DraftTree
from tercel.decode.growth import Growth, Shaped, Sized
from tercel.decode.history import TokenHistory
from tercel.decode.model_state import ModelState
from tercel.decode.proposer import Proposer, Row
from tercel.decode.proposers import SPS, Parts, ProposerKind
from tercel.decode.sampling import SamplingParams, sample, target_distribution
from tercel.decode.tree_policy import TreePolicy
from tercel.decode.types import Committed, Proposal
from tercel.draft.shape import CHAIN_DEPTH, WIDEST, TreeShape
from tercel.errors import TercelError
from tercel.reading import short
from tercel.target_model.kept import KeptTokens
from tercel.target_model.memory import CacheMemory
from tercel.target_model.output import TargetOutput
from tercel.target_model.protocol import TargetModel
from tercel.target_model.transfer import to_device


class SpeculativeSampling(Proposer):
    """Drafts with a second model. Drawn drafts have a shape that no token has a part in: as many chains from the root,
    side by side, as the shape has children, or a single one where a policy says how long it may be.

    Raises `TercelError` for a model of another tokenizer, or that cannot run drafts of such a shape.
    """

    name = SPS

    def __init__(self, model: TargetModel, target: TargetModel, shape: TreeShape | None = None) -> None:
        check_tokenizers(model, target)
        self.shape = shape or TreeShape.chain(CHAIN_DEPTH)
        self.max_nodes, self.needs_tree = self.shape.nodes, self.shape.top_k > 1
        support = model.tree_support
        if not (support.tree if self.needs_tree else support.chain):
            advice = "draft a chain with --tree chain:4" if support.chain else "take another model"
            raise TercelError(
                f"the draft model {model.source.name} cannot draft {self.shape}: {support.reason}; {advice}"
            )
        self.model = model
        self._vocabulary = min(model.vocab_size, target.vocab_size)
        self.widest = max(self.shape.top_k, self.shape.nodes // 4 if self.needs_tree else 1)  # most nodes of a level
        self._wide = target.vocab_size
        self._capacity, self._limited = 0, False
        self._state = ModelState(model, self._vocabulary)
        self._rows: list[Row] = []
        self._resumed: Sequence[Sequence[KeptTokens | None]] = ()  # what those have who come next
        self._clock = PhaseClock(model.device)  # until a loop brings its own
        self._policy: TreePolicy | None = None

    @property
    def memory(self) -> CacheMemory:
        return self._state.cache.memory

    def timed_by(self, clock: PhaseClock) -> None:
        self._clock = clock

    def sized_by(self, policy: TreePolicy) -> None:
        self._policy = policy

    def reset(self, capacity: int) -> None:
        self._state, self._rows, self._capacity = ModelState(self.model, self._vocabulary), [], capacity

    def taken(self, row: int, start: int, end: int, last: Committed | None) -> KeptTokens | None:
        """What the model has read of them, which the last step is no part of."""
        cache = self._state.cache
        known = min(end, cache.lengths[row])
        return cache.taken(row, start, known) if self.model.resumes and start < known else None

    def resume(self, kept: Sequence[Sequence[KeptTokens | None]]) -> None:
        self._resumed = kept

    def admit(self, rows: Sequence[Row], prompts: Sequence[TargetOutput]) -> None:
        first, resumed = len(self._rows), self._resumed
        self._resumed = ()
        self._rows += rows
        self._state.add_rows(len(rows), self._capacity)
        for row, kept in enumerate(resumed, first):
            self._state.resume(row, kept)
        self._state.catch_up([row.tokens for row in self._rows])

    def select_rows(self, rows: Sequence[int]) -> None:
        self._rows = [self._rows[row] for row in rows]
        self._state.select_rows(rows)

    def notes(self) -> Sequence[str]:
        if not self._limited:
            return ()
        limit, name = f"{self.model.context_length:,}", self.model.source.name
        return (f"the draft model {name} takes {limit} tokens; the text beyond them has no drafts",)

    @torch.no_grad()
    def propose(self, rows: Sequence[Row]) -> list[Proposal]:
        roots, depths = [row.tokens[-1] for row in rows], [self._depth(len(row.tokens)) for row in rows]
        if not any(depths):
            return [Proposal(DraftTree.root_only(root)) for root in roots]
        with self._clock.phase("head"):
            self._state.catch_up([row.tokens for row in rows])
        greedy = [row.params.greedy for row in rows]
        grown = self._grow(roots, depths) if any(greedy) else []
        drawn = [] if all(greedy) else self._draw(rows, depths)
        return [grown[row] if likeliest else drawn[row] for row, likeliest in enumerate(greedy)]

    def _depth(self, length: int) -> int:
        """How deep a draft behind so many tokens may be: the model is asked behind each of its levels but the last."""
        room = self.model.context_length - length + 1
        if room < self.shape.depth:
            self._limited = True
        return max(0, min(self.shape.depth, room, self.model.block_depth(length) + 2))

    def _grow(self, roots: Sequence[int], depths: Sequence[int]) -> list[Proposal]:
        """Its likeliest tokens, for every row, as a head's tree grows (`growth.py`)."""
        growth: Growth
        if self._policy is None:
            growth = Shaped(self.shape, len(roots), self.model.device)
        else:
            growth = Sized(self._policy.step, self.shape, self.widest, self.model.device)
        output_BPH = self._state.output[:, None]
        for depth in range(1, max(depths) + 1):
            with self._clock.phase("head"):
                log_q_BPC, tokens_BPC = self._state.best(output_BPH, self.shape.top_k)
            frontier = growth.level(tokens_BPC, log_q_BPC, last=depth == max(depths))
            if frontier is None:
                break
            with self._clock.phase("head"):
                output_BPH = self._state.draft_level(frontier.tokens, frontier.ancestors, depth)
        return growth.trees(roots, depths)

    def _draw(self, rows: Sequence[Row], depths: Sequence[int]) -> list[Proposal]:
        """Chains drawn from the model, side by side, for every row that samples:

        at the root: siblings drawn without replacement, in their order
        below: behind the last token of each chain the next one
        every distribution that was drawn from is kept: verification divides by it
        """
        width = 1 if self._policy is not None else min(self.shape.top_k, self.shape.nodes - 1)
        longest = self.shape.depth if self._policy is None else self._policy.step.chain_depth(self.shape.depth)
        longest = min(longest, (self.shape.nodes - 1) // width)
        drafts = [
            _Drawn(row, 0 if row.params.greedy else min(depth, longest), width)
            for row, depth in zip(rows, depths, strict=True)
        ]
        output_BKH = self._state.output[:, None]
        seen_BKD = torch.zeros(len(rows), width, 0, dtype=torch.bool, device=self.model.device)
        own_BKK = torch.eye(width, dtype=torch.bool, device=self.model.device).expand(len(rows), -1, -1)
        for depth in range(1, max(draft.depth for draft in drafts) + 1):
            with self._clock.phase("head"):
                logits_BKW = self._state.logits(output_BKH).cpu()  # on the host: drawing is done there
            for draft, logits_KW in zip(drafts, logits_BKW, strict=True):
                if depth <= draft.depth:
                    draft.take(logits_KW, depth)
            if depth < max(draft.depth for draft in drafts):
                tokens_BK = to_device([draft.last(width) for draft in drafts], self.model.device)
                seen_BKD = torch.cat([seen_BKD, own_BKK], -1)
                with self._clock.phase("head"):
                    output_BKH = self._state.draft_level(tokens_BK, seen_BKD, depth)
        return [draft.proposal(self._wide) for draft in drafts]


@dataclass
class _Drawn:
    """One row's chains. levels: their tokens, level by level; drawn_from: the distribution behind each node."""

    row: Row
    depth: int
    width: int
    levels: list[list[int]] = field(default_factory=list)
    drawn_from: list[Tensor] = field(default_factory=list)

    def take(self, logits_KW: Tensor, depth: int) -> None:
        """Draw the level at `depth`, unless the model's numbers are none: then the chains end."""
        count = 1 if depth == 1 else len(self.levels[0])
        if not logits_KW[:count].isfinite().all():
            self.depth = depth - 1  # the target goes on
            return
        params, history = _drawing(self.row.params), TokenHistory((), logits_KW.shape[-1])
        qs = [target_distribution(logits, params, history) for logits in logits_KW[:count]]
        self.drawn_from += qs
        stream, index = self.row.stream.for_drafts(), len(self.row.tokens) + depth
        if depth > 1:
            self.levels.append([sample(q, stream.uniform(index, lane)) for lane, q in enumerate(qs)])
            return
        left, drawn = qs[0].clone(), list[int]()
        for lane in range(min(self.width, int((left > 0).sum()))):
            drawn.append(sample(left, stream.uniform(index, lane)))
            left[drawn[-1]] = 0
        self.levels.append(drawn)

    def last(self, width: int) -> list[int]:
        """The newest token of each chain; where there is none, one that is never proposed."""
        tokens = self.levels[-1] if self.levels else []
        return [*tokens, *[0] * (width - len(tokens))]

    def proposal(self, vocabulary: int) -> Proposal:
        tokens = [self.row.tokens[-1], *(token for level in self.levels for token in level)]
        width = len(self.levels[0]) if self.levels else 1
        parents = [max(0, node - width) if node else -1 for node in range(len(tokens))]
        tree = DraftTree(tokens, parents)
        return Proposal(tree, self._distributions(vocabulary))

    def _distributions(self, vocabulary: int) -> Callable[[int], Tensor]:
        """`node` to `[V]`: what its children were drawn from, over the target's vocabulary."""

        def of(node: int) -> Tensor:
            q = self.drawn_from[node]
            return torch.cat([q, q.new_zeros(vocabulary - len(q))])

        return of


def _drawing(params: SamplingParams) -> SamplingParams:
    """Without what hangs on the text: the draft need not be the target's distribution, only near it."""
    return SamplingParams(params.temperature, params.top_k, params.top_p, params.min_p)


def check_tokenizers(model: TargetModel, target: TargetModel) -> None:
    """Raises `TercelError` if the two do not have the same tokens."""
    own, its = model.tokenizer_or_none, target.tokenizer_or_none
    if own is None or its is None or model.tokenizer_digest == target.tokenizer_digest:
        return
    ours, theirs = (tokenizer.get_vocab() for tokenizer in (own, its))
    differing = next(token for token in (*theirs, *ours) if theirs.get(token) != ours.get(token))
    raise TercelError(
        f"the draft model {model.source.name} has another tokenizer than {target.source.name}: {short(differing)} is "
        f"token {ours.get(differing, 'nothing')} there and {theirs.get(differing, 'nothing')} here; "
        "take a model of the same family"
    )


def _make(parts: Parts) -> SpeculativeSampling:
    assert parts.model is not None
    trees = parts.target.tree_support.tree and parts.model.tree_support.tree
    largest = WIDEST.beside(trees)
    return SpeculativeSampling(parts.model, parts.target, parts.shape or largest)


KIND = ProposerKind(_make, needs=("model",), draws=True, about="a second, smaller model (arXiv 2211.17192, 2302.01318)")
