"""Drafts that are right as often as is asked for: how fast the engine could be with a drafter that costs nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tercel.decode.draft_tree import DraftTree
from tercel.decode.engine import Engine
from tercel.decode.proposer import Proposer, Row
from tercel.decode.proposers import ORACLE, Parts, ProposerKind
from tercel.decode.sampling import SamplingParams
from tercel.decode.types import Proposal, Request
from tercel.decode.vanilla import Vanilla
from tercel.draft.shape import CHAIN_DEPTH, WIDEST, TreeShape
from tercel.errors import TercelError
from tercel.target_model.output import TargetOutput
from tercel.target_model.protocol import TargetModel


class Oracle(Proposer):
    """Drafts the target's own next tokens, each right with the chance `rate`, or else another token; with a tree's
    shape further wrong ones beside them, up to its size.

    The tokens are those of a first pass, token by token and from the same seed: `rehearse` makes it beforehand, or it
    is made when a request enters, in the time before its first token. answers: to prompts, where they are known.
    Raises `TercelError` for a rate that is no probability.
    """

    name = ORACLE

    def __init__(
        self,
        target: TargetModel,
        shape: TreeShape | None = None,
        rate: float = 1.0,
        answers: Mapping[tuple[int, ...], Sequence[int]] | None = None,
    ) -> None:
        if not 0 <= rate <= 1:
            raise TercelError(f"an oracle is right with a probability between 0 and 1, not {rate}")
        self.target, self.shape, self.rate = target, shape or TreeShape.chain(CHAIN_DEPTH), rate
        self.max_nodes, self.needs_tree = self.shape.nodes, self.shape.top_k > 1
        self._given = dict(answers or {})
        self._rehearsed: dict[tuple[tuple[int, ...], str], tuple[int, ...]] = {}
        self._texts: list[_Text] = []

    def rehearse(self, requests: Sequence[Request]) -> None:
        """The first pass of these, all at once; a request without a seed cannot be known before."""
        asked = [replace(request, text=False) for request in requests if request.prompt not in self._given]
        known = [request for request in asked if request.params.greedy or request.params.seed is not None]
        results = Engine(self.target, Vanilla(), slots=max(1, len(known))).generate(known)
        for request, result in zip(known, results, strict=True):
            self._rehearsed[request.prompt, _key(request.params)] = result.tokens

    def reset(self, capacity: int) -> None:
        self._texts = []

    def admit(self, rows: Sequence[Row], prompts: Sequence[TargetOutput]) -> None:
        for row in rows:
            prompt, params = tuple(row.tokens[:-1]), replace(row.params, seed=row.stream.seed)
            answer = self._given.get(prompt) or self._rehearsed.pop((prompt, _key(params)), None)
            if answer is None:
                self.rehearse([Request(prompt, params)])
                answer = self._rehearsed.pop((prompt, _key(params)))
            self._texts.append(_Text(len(prompt), tuple(answer)))

    def select_rows(self, rows: Sequence[int]) -> None:
        self._texts = [self._texts[row] for row in rows]

    def propose(self, rows: Sequence[Row]) -> list[Proposal]:
        return [self._propose(row, text) for row, text in zip(rows, self._texts, strict=True)]

    def _propose(self, row: Row, text: _Text) -> Proposal:
        done, size, stream = len(row.tokens) - text.prompt, self.target.vocab_size, row.stream.for_drafts()
        right = text.answer[done : done + self.shape.depth]
        # a token's fate hangs on its place alone, so that it is the same in every batch
        fine = [stream.uniform(len(row.tokens) + place) < self.rate for place in range(len(right))]
        spine = [token if good else (token + 1) % size for token, good in zip(right, fine, strict=True)]
        beside = [
            [*spine[:place], (token + number) % size]
            for place, token in enumerate(right)
            for number in range(2, self.shape.top_k + 1)
        ]
        return Proposal(DraftTree.merged(row.tokens[-1], [spine, *beside], self.shape.nodes))


@dataclass(frozen=True)
class _Text:
    """A row: the length of its prompt, and the answer that is to come."""

    prompt: int
    answer: tuple[int, ...]


def _key(params: SamplingParams) -> str:
    """Of all that an answer hangs on."""
    return repr(replace(params, seed=None, stop=()) if params.greedy else params)


def _make(parts: Parts) -> Oracle:
    return Oracle(parts.target, parts.shape or TreeShape.chain(WIDEST.depth))


KIND = ProposerKind(_make, about="the target's own answer, known from a first pass: the engine's ceiling")
