"""What the comparison with a running server says: of its text, its template, its traffic and its acceptance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tercel.chat.render import answer_text
from tercel.chat.template import encode
from tercel.decode.types import GenerationResult
from tercel.doctor.engine_client import SeenPrompt, Served
from tercel.doctor.findings import Finding
from tercel.draft.shape import TreeShape
from tercel.errors import TercelError
from tercel.measure.causes import Cause
from tercel.measure.divergence import first_difference
from tercel.measure.intervals import Interval
from tercel.measure.tasks import Prompt
from tercel.target_model.protocol import TargetModel

SHORT = 0.97  # of the tokens a step that the head should reach: what is below, and surely below, falls short
SHORT_OF_ONE = 0.9  # where one prompt gives no interval
SURE = 0.9  # of it: where the interval ends above this, nothing that matters can be wrong
NOTHING = 1.05  # tokens a step below which a head is as good as none


@dataclass(frozen=True)
class PairedAcceptance:
    """Of one side, on prompts that both were asked. tau: tokens a step, the target's own included. per_position: share
    of steps whose draft was accepted at least that far; None where the server does not tell."""

    tau: Interval
    per_position: tuple[Interval, ...] | None

    def to_json(self) -> dict[str, Any]:
        positions = self.per_position
        return {
            "tau": self.tau.value,
            "tau_ci95": self.tau.ci95,
            "per_position": None if positions is None else [p.value for p in positions],
            "per_position_ci95": None if positions is None else [p.ci95 for p in positions],
        }


@dataclass(frozen=True)
class Pair:
    """One prompt, answered by the server, by plain decoding, and by this package with the head."""

    prompt: Prompt
    served: Served
    plain: tuple[int, ...]
    drafted: GenerationResult

    @property
    def usable(self) -> bool:
        return self.served.counts.drafts > 0 and self.drafted.steps > 0


def falls_short(ratio: Interval) -> bool:
    if not math.isfinite(ratio.high):
        return ratio.value < SHORT_OF_ONE
    return ratio.value < SHORT and ratio.high < 1.0


def differs(target: TargetModel, pair: Pair) -> int | None:
    """The first generated token where the server's answer leaves token-by-token decoding; None if it never does."""
    ends = set(target.eos_token_ids)
    if pair.served.tokens is not None:
        theirs, ours = ([t for t in tokens if t not in ends] for tokens in (pair.served.tokens, pair.plain))
        return first_difference(theirs, ours)
    text = answer_text(target.tokenizer, pair.plain)
    if text.strip() == pair.served.text.strip():
        return None
    tokens = encode(target.tokenizer, pair.served.text)
    return first_difference(tokens, [t for t in pair.plain if t not in ends])


def may_fall_short(ratio: Interval) -> bool:
    """Whether it falls short, or would if the interval were shorter."""
    return falls_short(ratio) or ratio.value < SHORT


def text_finding(prompts: int, places: Sequence[int]) -> Finding:
    """places: of the answers to `prompts` that differ from ours, their first different tokens."""
    at_once = places.count(0)
    if not places:
        return Finding("server text", "ok", f"the same text as token by token, on {prompts} prompts")
    if at_once * 2 > prompts:
        return Finding(
            "server text",
            "problem",
            f"{at_once} of {prompts} answers differ from their first token on, to the very same prompt tokens",
            "the server holds another target: other weights, another quantisation, or float16 that overflows",
        )
    return Finding(
        "server text",
        "note",
        f"{len(places)} of {prompts} answers differ from ours, the first at token {min(places) + 1}",
        "near ties fall differently in another precision; compare in float32 on both sides to be sure",
    )


def template_finding(seen: SeenPrompt | TercelError | None, prompt: tuple[int, ...]) -> Finding | None:
    name = "server template"
    if seen is None:
        return None
    if isinstance(seen, TercelError):
        return Finding(name, "note", f"its own rendering of a chat could not be seen: {seen}", "try a chat by hand")
    if seen.tokens is not None and seen.tokens != prompt:
        at = first_difference(seen.tokens, prompt) or 0
        where = f"its prompt of {seen.length} tokens differs from the template's {len(prompt)}, from token {at + 1} on"
    elif seen.length != len(prompt):
        where = f"it makes {seen.length} prompt tokens of a chat where the template makes {len(prompt)}"
    else:
        return Finding(name, "ok", f"the server renders a chat as the target's template does ({seen.length} tokens)")
    return Finding(
        name,
        "problem",
        where,
        "start the server with the target's own chat template, without another system prompt or thinking switch",
    )


def traffic_finding(pairs: Sequence[Pair], draft: TreeShape) -> Finding | None:
    """More counted than these answers can have caused: somebody else uses the server, and nothing can be compared."""
    counted = sum(pair.served.counts.accepted + pair.served.counts.drafts for pair in pairs)
    possible = sum(pair.served.length + draft.depth for pair in pairs)
    if counted <= possible:
        return None
    return Finding(
        "server acceptance",
        "warning",
        f"it cannot be compared: the counters grew by {counted:.0f} tokens, but these answers have at most {possible}",
        "ask again when nobody else uses the server",
    )


def acceptance_finding(
    engine: str,
    there: PairedAcceptance,
    here: PairedAcceptance,
    ratio: Interval,
    causes: Sequence[Cause],
    text: Finding,
) -> Finding:
    name = "server acceptance"
    reached = f"{there.tau.value:.2f} tokens a step{_first(there)}"
    found = f"{reached}; this head should reach {here.tau.value:.2f}{_first(here)}"
    if math.isfinite(ratio.low):
        found += f" ({ratio.value:.2f} of it, {ratio.low:.2f}–{ratio.high:.2f})"
    if not falls_short(ratio):
        if ratio.low > SURE:
            return Finding(name, "ok", found)
        # where rounding has changed no text, it has hardly changed the drafts: a fault that fits is worth a word
        if text.level == "ok" and causes and causes[0].explains:
            found += f", too few prompts to be sure; {causes[0].setting} would give {causes[0].tau:.2f}"
            return Finding(name, "warning", found, f"give more --tasks; {causes[0].remedy}")
        return Finding(name, "note", f"{found}, as near as these prompts tell", "give more --tasks to be surer")
    if text.level == "problem":
        return Finding(name, "problem", f"{found}; likely cause: the server's target is not this one", text.advice)
    best = causes[0] if causes else None
    nothing = there.tau.value < NOTHING
    if best is not None and best.explains and not nothing:
        found += f"; likely cause: {best.setting}, which would give {best.tau:.2f}"
        return Finding(name, "problem", found, best.remedy)
    guess = "none of the known misreadings explains it"
    if nothing:
        likewise = f", or with {best.setting}" if best is not None and best.explains else ""
        guess = f"hardly any draft is right, as with weights left random over a tensor's wrong name{likewise}"
    return Finding(
        name,
        "problem",
        f"{found}; {guess}",
        f"serve a folder that `tercel export HEAD --to {engine}` wrote, with the target in the same precision",
    )


def _first(acceptance: PairedAcceptance) -> str:
    if not acceptance.per_position:
        return ""
    share = acceptance.per_position[0]
    return f" (first draft {share.value:.0%}, {share.low:.0%}–{share.high:.0%})"
