"""`tercel reproduce`: the experiments of the EAGLE-3 paper, and its claims judged by rules fixed before the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from tercel.cli.consoles import PlainConsole, counting_bar, result_console, say
from tercel.cli.groups import with_groups
from tercel.cli.options import DataDirs, DecodingModelOptions, HeadsFile
from tercel.cli.paths import user_name, user_path
from tercel.cli.reproduce_setting import Given, Places, Sizes, prepared
from tercel.errors import TercelError

if TYPE_CHECKING:
    from tercel.reproduce.experiments import Measured
    from tercel.reproduce.results import Result
    from tercel.reproduce.rules import Judged
    from tercel.reproduce.world import World

CLAIMS = "claims"
OUT, RUNS = Path("docs/reproduction"), Path("runs/reproduce")


class ScaleName(StrEnum):
    tiny = "tiny"
    small = "small"
    full = "full"


@with_groups
def command(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="table1, table2, table3, fig1, fig4, fig7, depth, robust, parallel; claims judges all of them.",
        ),
    ],
    sizes: Sizes,
    model: DecodingModelOptions,
    scale: Annotated[
        ScaleName,
        typer.Option(help="A tiny model that is built; the default target; or commands for the paper's models."),
    ] = ScaleName.small,
    target: Annotated[
        str | None,
        typer.Option(metavar="NAME", parser=user_name, help="Another target.", show_default="of the scale"),
    ] = None,
    heads: HeadsFile = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            parser=user_name,
            help="Conversations that the target answered: heads that are missing are trained on them.",
            show_default=False,
        ),
    ] = None,
    data_dir: DataDirs = None,
    draft_model: Annotated[
        str | None,
        typer.Option(metavar="NAME", parser=user_name, help="The second model of sps.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            parser=user_path,
            help="Where results go.",
            show_default=f"{OUT}, in a folder of the scale's name unless it is small",
        ),
    ] = None,
    runs: Annotated[
        Path,
        typer.Option(metavar="DIR", parser=user_path, help="Where heads and what is unfinished are kept."),
    ] = RUNS,
) -> None:
    """Do an experiment of the EAGLE-3 paper again; the same command goes on with one that was stopped."""
    from tercel.reproduce.experiments import EXPERIMENTS

    if name != CLAIMS and name not in EXPERIMENTS:
        raise TercelError(f"there is no experiment {name}; name one of {', '.join((*EXPERIMENTS, CLAIMS))}")
    names = tuple(EXPERIMENTS) if name == CLAIMS else (name,)
    console = result_console()
    if scale is ScaleName.full:
        from tercel.reproduce.full import all_commands

        for line in all_commands(names):
            console.print_line(line)
        return
    places = Places(out or (OUT if scale is ScaleName.small else OUT / scale.value), runs / scale.value)
    given = Given(scale.value, sizes, model, target, heads, tuple(data or ()), tuple(data_dir or ()), draft_model)
    print_rules(console, names)
    setting = prepared(given, places)
    setting.train(names)
    with counting_bar("answers") as bar:
        world = setting.open(lambda answer: bar(answer.done, answer.total, f"{answer.task}, {answer.method}"))
        told = setting.told(world)
        results = [measured(each, world, told, places, console, must=name != CLAIMS) for each in names]
    judge_all(names, [result for result in results if result is not None], given, told, places, console)


def measured(
    name: str, world: World, told: dict[str, Any], places: Places, console: PlainConsole, must: bool
) -> Result | None:
    """Run an experiment, or take what an earlier run with the same settings left; None if nothing of it is there and
    it need not be (`must`)."""
    from tercel.reproduce.experiments import EXPERIMENTS
    from tercel.reproduce.results import Result, write_page

    before = Result.read(places.out, name)
    if not must and before is not None and before.settings == told:
        say(f"{name}: taken from {places.out / f'{name}.json'}")
        return before
    experiment = EXPERIMENTS[name]
    say(f"{name}: {experiment.about}")
    try:
        found = experiment.measure(experiment, world)
    except TercelError as error:
        if must:
            raise
        say(f"note: {name} is left out: {error}")
        return None
    missing = {each: why for each, why in world.missing.items() if each in experiment.names}
    result = Result(name, told, found.samples, missing, found.extra)
    lines = [result.write(places.out), write_page(result, found, _judged(name, result), places.out)]
    print_result(console, found, result)
    for line in lines:
        console.print_line(f"written  {line}")
    return result


def _judged(name: str, result: Result, command: str = "") -> list[Judged]:
    from tercel.reproduce.claims import CLAIMS as ALL_CLAIMS
    from tercel.reproduce.rules import judge

    found = {name: result.samples}
    return [judge(claim, found, command, result.missing) for claim in ALL_CLAIMS if claim.experiment == name]


def judge_all(
    names: Sequence[str],
    results: Sequence[Result],
    given: Given,
    told: Mapping[str, Any],
    places: Places,
    console: PlainConsole,
) -> None:
    """Print the verdicts; with all experiments, also write them."""
    from tercel.reproduce.claims import CLAIMS as ALL_CLAIMS
    from tercel.reproduce.results import write_claims
    from tercel.reproduce.rules import judge

    found = {result.name: result.samples for result in results}
    absent = {name: why for result in results for name, why in result.missing.items()}
    judged = [
        judge(claim, found, given.command(claim.experiment), absent)
        for claim in ALL_CLAIMS
        if claim.experiment in names
    ]
    written = write_claims(judged, told, places.out) if len(names) > 1 else ()
    if judged:
        console.print(verdict_table(judged))
    for file in written:
        console.print_line(f"written  {file}")


def print_rules(console: PlainConsole, names: Sequence[str]) -> None:
    """What will be judged, and how: before anything is measured."""
    from tercel.reproduce.claims import CLAIMS as ALL_CLAIMS
    from tercel.reproduce.rules import STATISTICS

    table = Table(title="rules, fixed before the run: reproduced if the whole 95 % interval lies there, not reproduced "
                  "if wholly elsewhere, else undecided")  # fmt: skip
    for heading in ("experiment", "claim", "paper", "reproduced if"):
        table.add_column(heading)
    for claim in ALL_CLAIMS:
        if claim.experiment in names:
            table.add_row(
                claim.experiment, claim.text, claim.published, f"{STATISTICS[claim.statistic]} {claim.rule}"
            )
    if table.row_count:
        console.print(table)


def print_result(console: PlainConsole, found: Measured, result: Result) -> None:
    """Table 1's layout where there is one, and every number."""
    from tercel.measure.intervals import with_interval
    from tercel.measure.report import table1_text
    from tercel.measure.table import LEGEND, table1

    for sized, fixed in found.reports:
        console.print(table1_text(table1(sized, fixed)))
    if found.reports:
        console.print_line(f"speedup with drafts as large as pays, τ in the papers' trees; {LEGEND}")
        return
    table = Table("quantity", "measured")
    for name, interval in result.intervals():
        table.add_row(name, with_interval(interval, 3))
    console.print(table)


def verdict_table(judged: Sequence[Judged]) -> Table:
    from tercel.measure.intervals import with_interval

    table = Table(title="claims")
    for heading in ("claim", "paper", "measured", "rule", "verdict"):
        table.add_column(heading)
    for each in judged:
        verdict = f"{each.verdict} ({each.why})" if each.why else each.verdict
        table.add_row(each.claim.text, each.claim.published, with_interval(each.interval), each.rule, verdict)
    return table
