"""`tercel verify`: proof that drafts change the speed and not the text."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from tercel import limits
from tercel.cli.consoles import PlainConsole, counting_bar, result_console
from tercel.cli.groups import with_groups
from tercel.cli.models import open_proposer, open_sampling, open_target, say_notes
from tercel.cli.options import DataDirs, DecodingModelOptions, DraftOptions, HeadName, JsonFile, TargetName, TaskList
from tercel.cli.sampling_options import FollowConfig
from tercel.decode.proposers import VANILLA, make_proposer, proposer_kind
from tercel.errors import TercelError
from tercel.files import write_json

if TYPE_CHECKING:
    from tercel.measure.lossless import Divergence, GreedyCheck, SameSeedCheck, SampledCheck, VerifyReport

SHOWN = 5  # divergences printed; the JSON file has all


class Check(StrEnum):
    both = "both"
    greedy = "greedy"
    sampled = "sampled"


@with_groups
def command(
    target: TargetName,
    model: DecodingModelOptions,
    draft: DraftOptions,
    head: HeadName = None,
    tasks: TaskList = "demo",
    data_dir: DataDirs = None,
    check: Annotated[Check, typer.Option(help="Which text is checked.")] = Check.both,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a greedy answer.")] = 64,
    temperature: Annotated[float, typer.Option(help="Of the sampled check.")] = 1.0,
    samples: Annotated[int, typer.Option(min=1, max=limits.REPEATS, help="Sampled answers to each prompt.")] = 32,
    sampled_prompts: Annotated[int, typer.Option(min=1, help="Prompts that are sampled, the first ones.")] = 2,
    sampled_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a sampled answer.")] = 16,
    slots: Annotated[int, typer.Option(min=1, max=limits.SLOTS, help="Requests decoded at a time.")] = 1,
    seed: Annotated[int, typer.Option(help="Makes the samples repeatable.")] = 0,
    json_file: JsonFile = None,
    generation_config: FollowConfig = True,
) -> None:
    """Compare drafted text with token-by-token decoding and with the target's own distribution.

    Exits with 1 if a difference is found that rounding does not explain. Computes in float32 unless told
    otherwise.
    """
    if check is not Check.greedy and temperature <= 0:
        raise TercelError(f"the sampled check needs a --temperature above 0, not {temperature}")
    draft.require_drafts()
    from tercel.decode.engine import Engine
    from tercel.decode.generation_config import Asked
    from tercel.measure.lossless import VerifyReport, check_greedy, check_sampled
    from tercel.measure.tasks import first_prompts, parse_tasks

    given = {"temperature": temperature, "seed": seed, "max_new_tokens": sampled_tokens}
    drawn = Asked(given, generation_config=generation_config)
    plain = Asked({"temperature": 0.0, "max_new_tokens": max_new_tokens}, generation_config=generation_config)
    asked = parse_tasks(tasks, tuple(data_dir or ()))
    loaded = open_target(target, model, exact=True)
    params = open_sampling(plain if check is Check.greedy else drawn, loaded)
    drafted = Engine(loaded, open_proposer(head, loaded, draft, slots), slots=slots)
    vanilla = Engine(loaded, make_proposer(VANILLA, loaded), slots=slots)
    prompts = [p for p in first_prompts(loaded.tokenizer, asked) if len(p.tokens) < loaded.context_length]
    greedy = sampled = None
    if check is not Check.sampled:
        best = plain.of(loaded).params
        with counting_bar("greedy text") as bar:
            greedy = check_greedy(loaded, drafted, vanilla, prompts, best, lambda done, total: bar(done, total, ""))
    if check is not Check.greedy:
        few = prompts[:sampled_prompts]
        with counting_bar("sampled text") as bar:
            sampled = check_sampled(
                loaded,
                drafted,
                few,
                samples,
                params,
                vanilla=None if proposer_kind(draft.method).draws else vanilla,
                progress=lambda done, total: bar(done, total, ""),
            )
    rule = drafted.proposer.lossy
    report = VerifyReport(greedy, sampled, loaded.weights, None if rule is None else rule.title)
    try:
        if json_file is not None:
            write_json(json_file, report.to_json())
    finally:
        print_report(result_console(json_file), report)
        say_notes(drafted.proposer)
    if not report.ok:
        raise typer.Exit(1)


def print_report(console: PlainConsole, report: VerifyReport) -> None:
    table = Table("check", "compared", "drafts accepted", "found", "verdict")
    divergences: list[Divergence] = []
    for row, found in _rows(report):
        table.add_row(*row)
        divergences += found
    console.print(table)
    for divergence in divergences[:SHOWN]:
        console.print_line(_line(divergence))
    if len(divergences) > SHOWN:
        console.print_line(f"and {len(divergences) - SHOWN} more; --json lists all")
    verdict = "lossless: no difference but rounding" if report.ok else "NOT lossless"
    if report.lossy is not None:
        verdict += f": {report.lossy} is no lossless rule, whatever these checks found"
    if report.weights is not None:
        verdict += f", beside the same model with the same {report.weights} weights"
    console.print_line(verdict, "bold green" if report.ok else "bold red")


def _rows(report: VerifyReport) -> Iterator[tuple[tuple[str, ...], tuple[Divergence, ...]]]:
    if report.greedy is not None:
        yield _same_text("greedy text", report.greedy, str(report.greedy.accepted)), report.greedy.divergences
    if report.sampled is not None:
        yield _distribution(report.sampled), ()
        if report.sampled.same_seed is not None:
            same = report.sampled.same_seed
            yield _same_text("same seed, same text", same, str(report.sampled.accepted)), same.divergences


def _same_text(name: str, check: GreedyCheck | SameSeedCheck, accepted: str) -> tuple[str, ...]:
    wrong = sum(divergence.verdict != "numerical" for divergence in check.divergences)
    found = f"{len(check.divergences)} divergences, {wrong} of them wrong"
    compared = f"{check.identical} of {check.sequences} answers identical, {check.tokens} tokens"
    return name, compared, accepted, found, _verdict(check.ok)


def _distribution(check: SampledCheck) -> tuple[str, ...]:
    compared = f"{check.samples} samples, {check.tokens} tokens"
    fine = check.p_value >= check.alpha
    found = f"p = {check.p_value:.3g} (at least {check.alpha:g})"
    return "sampled distribution", compared, str(check.accepted), found, _verdict(fine)


def _verdict(ok: bool) -> str:
    return "passed" if ok else "FAILED"


def _line(divergence: Divergence) -> str:
    return (
        f"{divergence.id}, token {divergence.position}: drafted {divergence.token_draft}, token by token "
        f"{divergence.token_vanilla}; gap {divergence.gap:.3g}, rounding {divergence.noise:.3g}: "
        f"{divergence.verdict}"
    )
