"""The steps of an answer, told one by one: what a record's numbers stand for, and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tercel.decode.trace import StepTrace
from tercel.draft.acceptance import acceptance_length, tokens_of_steps
from tercel.explain.pieces import Piece, TokenNames, TokenPieces

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tercel.decode.types import Event, GenerationResult

BEHIND = 60  # characters of the text before a step that are told


@dataclass(frozen=True)
class Step:
    """One forward of the target, over the draft tree that hangs on the text so far.

    number: 0 is prefill, which has no drafts. before: the end of the answer's text before it. pieces: what it added to
    the answer. names: of the nodes' tokens; taken: of the token of each choice, and likeliest: of those told of it.
    tokens: of the answer with this step. drafted, accepted: tokens so far, this step's included.
    """

    number: int
    trace: StepTrace
    before: str
    pieces: tuple[Piece, ...]
    names: tuple[str, ...]
    taken: tuple[str, ...]
    likeliest: tuple[tuple[str, ...], ...]
    tokens: int
    drafted: int
    accepted: int

    @property
    def tau(self) -> float:
        """Acceptance length so far."""
        return acceptance_length(tokens_of_steps(self.tokens), self.number)

    def depths(self) -> list[int]:
        depths = [0]
        for node in self.trace.nodes[1:]:
            depths.append(depths[node.parent] + 1)
        return depths

    def children(self, node: int) -> list[int]:
        return [child for child, own in enumerate(self.trace.nodes) if own.parent == node]

    def to_json(self) -> dict[str, Any]:
        """Every node and choice with its scores; `docs/explain.md` says what they mean."""
        trace, path = self.trace, {0, *self.trace.path}
        nodes, paths = [], list[float | None]([1.0])
        for number, (node, name, depth) in enumerate(zip(trace.nodes, self.names, self.depths(), strict=True)):
            if number:
                above = paths[node.parent]
                paths.append(None if above is None or node.draft is None else above * node.draft)
            nodes.append(
                {
                    "node": number,
                    "parent": node.parent,
                    "depth": depth,
                    "token": node.token,
                    "text": name,
                    "draft_probability": node.draft,
                    "draft_path_probability": paths[number] if number else None,
                    "target_probability": node.target,
                    "accepted": number in path and number > 0,
                }
            )
        return {
            "step": self.number,
            "position": trace.position,
            "tokens": [{"token": p.token, "text": p.text, "drafted": p.drafted} for p in self.pieces],
            "tau": self.tau,
            "nodes": nodes,
            "choices": [self._choice(place) for place in range(len(trace.choices))],
            "seconds": dict(trace.split),
        }

    def _choice(self, place: int) -> dict[str, Any]:
        choice = self.trace.choices[place]
        likeliest = zip(choice.likeliest, self.likeliest[place], strict=True)
        return {
            "node": choice.node,
            "token": choice.token,
            "text": self.taken[place],
            "probability": choice.probability,
            "drafted": place < len(self.trace.path),
            "likeliest": [{"token": token, "text": name, "probability": p} for (token, p), name in likeliest],
            "uniform": choice.uniform,
            "span": None if choice.span is None else list(choice.span),
            "lossy": choice.lossy,
            "trials": [
                {
                    "node": trial.child,
                    "target_probability": trial.target,
                    "draft_probability": trial.draft,
                    "uniform": trial.uniform,
                    "accepted": trial.accepted,
                }
                for trial in choice.trials
            ],
        }


class Narrator:
    """Makes steps of one traced request's events, as they come."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str] = ()) -> None:
        self._pieces, self._names = TokenPieces(tokenizer, stop), TokenNames(tokenizer)
        self._before = ""
        self._steps = self._tokens = self._drafted = self._accepted = 0

    def of(self, event: Event) -> Step | None:
        """The step that the event ended; None if it tells of none, because the request was aborted or failed."""
        pieces = tuple(self._pieces.of(event))
        before, self._before = self._before, (self._before + "".join(p.text for p in pieces))[-BEHIND:]
        trace = event.trace
        if trace is None:
            return None
        number, self._steps = self._steps, self._steps + 1
        self._tokens += len(event.emission.tokens)
        self._drafted += len(trace.nodes) - 1
        self._accepted += event.drafted
        nodes, names = trace.nodes, self._names
        behind = [nodes[choice.node].token for choice in trace.choices]
        return Step(
            number,
            trace,
            before,
            pieces,
            tuple(names.of(node.token, None if node.parent < 0 else nodes[node.parent].token) for node in nodes),
            tuple(names.of(choice.token, last) for choice, last in zip(trace.choices, behind, strict=True)),
            tuple(
                tuple(names.of(token, last) for token, _ in choice.likeliest)
                for choice, last in zip(trace.choices, behind, strict=True)
            ),
            self._tokens,
            self._drafted,
            self._accepted,
        )


@dataclass(frozen=True)
class Explanation:
    """An answer and all of its steps. facts: what it was made with, by names for people."""

    prompt: str
    steps: tuple[Step, ...]
    result: GenerationResult
    facts: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        result = self.result
        return {
            **self.facts,
            "prompt": self.prompt,
            "text": result.text,
            "tokens": list(result.tokens),
            "finish_reason": result.finish_reason,
            "prompt_tokens": result.prompt_tokens,
            "tau": result.tau,
            "accepted": list(result.accepted),
            "steps": [step.to_json() for step in self.steps],
        }
