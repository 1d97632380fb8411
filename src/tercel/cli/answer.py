"""Showing an answer while it grows: plain, or with the accepted drafts in another colour."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.text import Text

from tercel.cli.consoles import Piece, PlainConsole

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tercel.decode.engine import Engine
    from tercel.decode.types import Event, GenerationResult, Request

ACCEPTED, OWN = "green", ""
LEGEND = Text.assemble(("green", ACCEPTED), ": drafted and accepted; plain: the target's own")


class ColouredText:
    """Pieces of text of events, one a token: green if it was an accepted draft."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str]) -> None:
        from tercel.explain.pieces import TokenPieces

        self._pieces = TokenPieces(tokenizer, stop)

    def of(self, event: Event) -> list[Piece]:
        """What the event adds. A character made of several tokens has the style of the last one."""
        return [(piece.text, ACCEPTED if piece.drafted else OWN) for piece in self._pieces.of(event)]


@dataclass(frozen=True)
class Shown:
    """An answer that was streamed to the user, and the seconds it took, prefill included; lossy: the rule by which its
    drafts were accepted, if that changes the text."""

    result: GenerationResult
    seconds: float
    lossy: str | None = None


def stream_answer(engine: Engine, request: Request, console: PlainConsole, *, colours: bool) -> Shown:
    """Generate one answer, print it as it grows, and end the line. Raises `TercelError` if the prompt does not fit."""
    coloured = ColouredText(engine.target.tokenizer, request.params.stop)
    started = time.perf_counter()
    result = None
    for event in engine.stream([request]):
        console.print_answer(coloured.of(event) if colours else [(event.emission.text, OWN)])
        result = event.result
    assert result is not None
    console.print()
    rule = engine.proposer.lossy
    return Shown(result.require(), time.perf_counter() - started, None if rule is None else rule.title)


def rate_line(shown: Shown) -> str:
    """Tokens, seconds, tokens a second and acceptance length, in one line."""
    result = shown.result
    count = len(result.tokens)
    rate = (count - 1) / result.decode_seconds if result.steps else 0.0
    line = f"{count} tokens in {shown.seconds:.2f} s, {rate:.1f} tokens/s after the first, τ {result.tau:.2f}"
    return line if shown.lossy is None else f"{line}, lossy: {shown.lossy}"


def as_json(shown: Shown) -> dict[str, Any]:
    result = shown.result
    return {
        "text": result.text,
        "tokens": list(result.tokens),
        "finish_reason": result.finish_reason,
        "prompt_tokens": result.prompt_tokens,
        "steps": result.steps,
        "tau": result.tau,
        "accepted": list(result.accepted),
        "nodes": result.nodes,
        "seconds": shown.seconds,
        "prefill_seconds": result.prefill_seconds,
        "decode_seconds": result.decode_seconds,
        "split": result.split,
        "lossy": shown.lossy,
    }
