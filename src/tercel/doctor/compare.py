"""A running server against this package, on the same head, target and prompts: text, prompts, acceptance; and if
acceptance falls short, which known fault would give what was measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tercel.decode.engine import Engine
from tercel.decode.proposers import EAGLE3, VANILLA, make_proposer
from tercel.decode.sampling import SamplingParams
from tercel.doctor.engine_client import EngineClient, SeenPrompt, Served
from tercel.doctor.findings import Finding
from tercel.doctor.served_checks import (
    Pair,
    PairedAcceptance,
    acceptance_finding,
    differs,
    may_fall_short,
    template_finding,
    text_finding,
    traffic_finding,
)
from tercel.draft import DraftModel
from tercel.draft.acceptance import count_chains, tokens_of_steps
from tercel.draft.shape import TreeShape
from tercel.errors import TercelError
from tercel.measure.causes import Cause, rank_causes
from tercel.measure.counts import told_shape
from tercel.measure.divergence import Progress, counting_from
from tercel.measure.intervals import Interval, proportion, ratio_of_totals, speedup
from tercel.measure.probe import SLOTS, answer_all, answered
from tercel.measure.tasks import Prompt, Question, prompt_ids, question_messages
from tercel.target_model.protocol import TargetModel


@dataclass(frozen=True)
class ServingReport:
    """server, tercel: acceptance there and here on the same prompts; ratio: the server's tokens a step over ours,
    prompts resampled in pairs. causes: what would explain a shortfall, the likeliest first."""

    engine: str
    draft: TreeShape
    prompts: int
    same_text: int
    server: PairedAcceptance
    tercel: PairedAcceptance
    ratio: Interval
    causes: tuple[Cause, ...]
    findings: tuple[Finding, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "engine": self.engine,
            "draft": asdict(self.draft),
            "prompts": self.prompts,
            "same_text": self.same_text,
            "acceptance_server": self.server.to_json(),
            "acceptance_tercel": self.tercel.to_json(),
            "ratio": self.ratio.value,
            "ratio_ci95": self.ratio.ci95,
            "causes": [cause.to_json() for cause in self.causes],
        }


def compare_with_server(
    server: EngineClient,
    target: TargetModel,
    model: DraftModel,
    questions: Sequence[Question],
    max_new_tokens: int,
    progress: Progress = lambda done, total: None,
) -> ServingReport:
    """Ask the server and this package the same questions, greedily.

    Prompts that leave no room for an answer are left out. Raises `TercelError` if none is left, or if the server cannot
    be reached, drafts nothing, or answers unlike its engine.
    """
    prompts = [Prompt(question.id, prompt_ids(target.tokenizer, question)) for question in questions]
    prompts = [prompt for prompt in prompts if len(prompt.tokens) + max_new_tokens <= room(target, model)]
    if not prompts:
        raise TercelError(
            f"no prompt leaves room for {max_new_tokens} new tokens in the {room(target, model)} positions of head "
            "and target; give shorter --tasks or lower --max-new-tokens"
        )
    params, total = SamplingParams(max_new_tokens=max_new_tokens), 3 * len(prompts)
    served = []
    for done, prompt in enumerate(prompts, 1):  # one by one, so that the counters belong to this prompt
        served.append(server.answer(prompt.tokens, max_new_tokens))
        progress(done, total)
    draft = draft_of(server, served)
    proposers = (make_proposer(VANILLA, target), make_proposer(EAGLE3, target, head=model, shape=draft))
    results = []
    for number, proposer in enumerate(proposers, 1):
        before, engine = number * len(prompts), Engine(target, proposer, slots=SLOTS)
        results.append(answer_all(engine, prompts, params, counting_from(before, total, progress)))
    pairs = [
        Pair(prompt, answer, plain.tokens, drafted)
        for prompt, answer, plain, drafted in zip(prompts, served, *results, strict=True)
    ]
    return _report(server, target, model, draft, pairs, _chat_prompt(server, target, questions, prompts[0]))


def room(target: TargetModel, model: DraftModel) -> int:
    """Positions that both have."""
    return min(target.context_length, model.head.config.max_position_embeddings)


def draft_of(server: EngineClient, served: Sequence[Served]) -> TreeShape:
    """What the server drafts: as it says, or as its counters show."""
    draft = server.draft()
    counts = [answer.counts for answer in served]
    steps, drafted = sum(c.drafts for c in counts), sum(c.drafted for c in counts)
    if steps == 0:
        raise TercelError(
            f"the server drafted nothing for {len(served)} prompts, so it runs without the head; start it with the "
            f"line that `tercel serve-command HEAD --engine {server.engine}` prints"
        )
    # the last chain of an answer may be cut, so the mean lies a little below the depth
    return draft or told_shape(max(1, math.ceil(drafted / steps - 1e-9)))


def _chat_prompt(
    server: EngineClient, target: TargetModel, questions: Sequence[Question], prompt: Prompt
) -> SeenPrompt | TercelError | None:
    """The server's own rendering of the question behind `prompt`; None for a target without a template."""
    question = next(question for question in questions if question.id == prompt.id)
    if not target.tokenizer.chat_template:
        return None
    try:
        messages = [message.to_json() for message in question_messages(question)]
        return server.chat_prompt(messages, target.template_arguments)
    except TercelError as error:  # some servers have no chat route; that is told, and the rest goes on
        return error


def _report(
    server: EngineClient,
    target: TargetModel,
    model: DraftModel,
    draft: TreeShape,
    pairs: Sequence[Pair],
    seen: SeenPrompt | TercelError | None,
) -> ServingReport:
    usable = [pair for pair in pairs if pair.usable]
    if not usable:
        raise TercelError("every answer ended before a draft could be verified; give longer --tasks")
    theirs = [_steps_of(pair.served) for pair in usable]
    ours = [(float(tokens_of_steps(pair.drafted.tokens)), float(pair.drafted.steps)) for pair in usable]
    ratio = speedup(*_columns(theirs), *_columns(ours))
    there, here = _server_acceptance(usable, theirs), _own_acceptance(usable, ours, draft.depth)
    different = [place for pair in pairs if (place := differs(target, pair)) is not None]
    text = text_finding(len(pairs), different)
    template = template_finding(seen, pairs[0].prompt.tokens)
    causes: tuple[Cause, ...] = ()
    traffic = traffic_finding(pairs, draft)
    if may_fall_short(ratio) and traffic is None:
        answers = [answered(pair.prompt, pair.plain) for pair in usable]
        causes = rank_causes(model, target, answers, draft, [pair.served.counts for pair in usable], ratio.value)
    acceptance = traffic or acceptance_finding(server.engine, there, here, ratio, causes, text)
    findings = tuple(finding for finding in (template, text, acceptance) if finding is not None)
    same = len(pairs) - len(different)
    return ServingReport(server.engine, draft, len(pairs), same, there, here, ratio, causes, findings)


def _steps_of(served: Served) -> tuple[float, float]:
    """What an answer's steps yielded, and how many they were.

    Not the accepted drafts: some engines count those that an answer's end cut off, and some do not draft them.
    """
    return float(tokens_of_steps(served.length)), served.counts.drafts


def _columns(rows: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [tokens for tokens, _ in rows], [steps for _, steps in rows]


def _server_acceptance(pairs: Sequence[Pair], steps: Sequence[tuple[float, float]]) -> PairedAcceptance:
    told = [pair.served.counts.per_position for pair in pairs]
    if any(positions is None for positions in told):
        return PairedAcceptance(ratio_of_totals(*_columns(steps)), None)
    known = [positions for positions in told if positions is not None]
    drafts, depth = int(sum(count for _, count in steps)), max(map(len, known))
    sums = [int(sum(positions[i] for positions in known if i < len(positions))) for i in range(depth)]
    shares = tuple(proportion(min(count, drafts), drafts) for count in sums)
    return PairedAcceptance(ratio_of_totals(*_columns(steps)), shares)


def _own_acceptance(pairs: Sequence[Pair], steps: Sequence[tuple[float, float]], depth: int) -> PairedAcceptance:
    accepted = [count for pair in pairs for count in pair.drafted.accepted]
    chains = count_chains(accepted, [depth] * len(accepted), depth)
    shares = tuple(proportion(right, len(accepted)) for right in chains.right)
    return PairedAcceptance(ratio_of_totals(*_columns(steps)), shares)
