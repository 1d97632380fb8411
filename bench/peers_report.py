"""What came of a comparison of peers: speeds and their ratios from the same rounds, acceptance, equality of texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from interleaved import Round
from line_protocol import Answer

from tercel.draft.acceptance import tokens_of_steps
from tercel.measure.intervals import Interval, ratio_of_totals, speedup

VANILLA = "vanilla"
OWN, YARDSTICK = "tercel-vanilla", "transformers-vanilla"


def vanilla_of(peer: str) -> str:
    return f"{peer.partition('-')[0]}-{VANILLA}"


def by_task(rounds: Sequence[Round]) -> dict[str, list[Round]]:
    found: dict[str, list[Round]] = {}
    for one in rounds:
        found.setdefault(one.asked.task, []).append(one)
    return found


def summaries(rounds: Sequence[Round], greedy: bool) -> dict[str, dict[str, Any]]:
    """Of every peer that answered all these rounds."""
    answers = {peer: [one.answers[peer] for one in rounds] for peer in complete(rounds)}
    return {peer: summary(peer, answers, greedy) for peer in answers}


def complete(rounds: Sequence[Round]) -> list[str]:
    return [peer for peer in rounds[0].answers if all(peer in one.answers for one in rounds)] if rounds else []


def summary(peer: str, answers: Mapping[str, Sequence[Answer]], greedy: bool) -> dict[str, Any]:
    own = answers[peer]
    tokens, seconds = [len(a.tokens) for a in own], [a.seconds for a in own]
    rate = ratio_of_totals(tokens, seconds)
    drafts = sum(a.drafts or 0 for a in own)
    accepted = [sum(counts) for counts in zip_longest(*(a.accepted or () for a in own), fillvalue=0)]
    same = {"as_own_vanilla": vanilla_of(peer), "as_tercel_vanilla": OWN}
    return {
        "tokens_per_s": rate.value,
        "ci95": rate.ci95,
        "questions": len(own),
        "tokens": sum(tokens),
        "seconds": sum(seconds),
        "ms_per_token": 1e3 * sum(seconds) / sum(tokens),
        **_with_interval("tau", _tau(own)),
        "drafts": drafts or None,
        "accepted_per_draft": [count / drafts for count in accepted] if drafts else None,
        "same_text": {how: _same(own, answers[base]) for how, base in same.items() if greedy and base in answers},
    }


def ratios(rounds: Sequence[Round]) -> dict[str, dict[str, dict[str, Any]]]:
    """Tokens a second of every peer over those of every other, questions resampled in pairs."""
    columns = {
        peer: ([len(one.answers[peer].tokens) for one in rounds], [one.answers[peer].seconds for one in rounds])
        for peer in complete(rounds)
    }
    return {
        peer: {
            base: _with_interval("ratio", speedup(*columns[peer], *columns[base])) for base in columns if base != peer
        }
        for peer in columns
    }


def report(rounds: Sequence[Round], greedy: bool) -> dict[str, Any]:
    tasks = by_task(rounds)
    return {
        "tasks": {task: summaries(own, greedy) for task, own in tasks.items()},
        "all": summaries(rounds, greedy),
        "ratios": {**{task: ratios(own) for task, own in tasks.items()}, "all": ratios(rounds)},
        "answers": {
            task: {one.asked.id: {peer: _told(a) for peer, a in one.answers.items()} for one in own}
            for task, own in tasks.items()
        },
    }


def table(found: Mapping[str, Any]) -> str:
    """Markdown: tokens a second by task, and over all questions acceptance length, ratios and equal texts."""
    tasks: Mapping[str, Any] = found["tasks"]
    peers = list(dict.fromkeys(peer for own in tasks.values() for peer in own))
    head = ["peer", *(f"{task}, tokens/s" for task in tasks), "τ", f"over {YARDSTICK}", "over own vanilla", "same text"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for peer in peers:
        whole, over = found["all"].get(peer, {}), found["ratios"]["all"].get(peer, {})
        cells = [f"{own[peer]['tokens_per_s']:.1f} {_range(own[peer]['ci95'])}" if peer in own else "" for own in
                 tasks.values()]  # fmt: skip
        tau, same = whole.get("tau"), whole.get("same_text", {}).get("as_own_vanilla")
        cells += [
            "" if tau is None else f"{tau:.2f}",
            *(f"{o['ratio']:.2f} {_range(o['ci95'])}" if (o := over.get(base)) else "" for base in
              (YARDSTICK, vanilla_of(peer))),
            "" if same is None else f"{same['equal']} of {same['of']}",
        ]  # fmt: skip
        lines.append("| " + " | ".join([peer, *(cell.strip() for cell in cells)]) + " |")
    return "\n".join(lines)


def _tau(answers: Sequence[Answer]) -> Interval | None:
    """Tokens that a run of the target yielded; None where an engine does not tell its runs."""
    tokens, steps = [tokens_of_steps(a.tokens) for a in answers], [a.steps for a in answers if a.steps is not None]
    if len(steps) < len(answers) or not sum(steps) or not sum(tokens):
        return None
    return ratio_of_totals(tokens, steps)


def _same(answers: Sequence[Answer], wanted: Sequence[Answer]) -> dict[str, int]:
    equal = sum(a.tokens == w.tokens for a, w in zip(answers, wanted, strict=True))
    return {"equal": equal, "of": len(answers)}


def _told(answer: Answer) -> dict[str, Any]:
    return {
        "tokens": len(answer.tokens),
        "seconds": answer.seconds,
        "steps": answer.steps,
        "drafts": answer.drafts,
        "accepted": answer.accepted,
    }


def _with_interval(name: str, interval: Interval | None) -> dict[str, Any]:
    if interval is None:
        return {name: None, "ci95" if name == "ratio" else f"{name}_ci95": None}
    return {name: interval.value, "ci95" if name == "ratio" else f"{name}_ci95": interval.ci95}


def _range(ci95: Sequence[float] | None) -> str:
    return "" if ci95 is None else f"[{ci95[0]:.2f}, {ci95[1]:.2f}]"
