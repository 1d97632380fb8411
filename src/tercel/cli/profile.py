"""`tercel profile`: where the time of decoding goes, beside what this machine would need at least."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from tercel.cli.consoles import counting_bar, result_console, say
from tercel.cli.groups import with_groups
from tercel.cli.models import open_proposer, open_sampling, open_target, say_notes
from tercel.cli.options import DataDirs, DecodingModelOptions, DraftOptions, HeadName, JsonFile, PlotFile, TargetName
from tercel.cli.paths import user_names
from tercel.cli.sampling_options import FollowConfig
from tercel.cli.settings import parse_numbers
from tercel.decode.proposers import VANILLA, make_proposer, proposer_kind
from tercel.files import write_json
from tercel.heads import shipped

if TYPE_CHECKING:
    from tercel.decode.proposer import Proposer
    from tercel.target_model.model import Target


@with_groups
def command(
    target: TargetName,
    model: DecodingModelOptions,
    draft: DraftOptions,
    head: HeadName = None,
    widths: Annotated[
        str | None,
        typer.Option(metavar="N,…", help="Tokens of a block.", show_default="1,2,4,8,16,32,64"),
    ] = None,
    contexts: Annotated[
        str | None,
        typer.Option(
            metavar="N,…",
            help="Tokens before a block.",
            show_default="64,256,1024,4096, as far as context and memory go; with --quick 256",
        ),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            metavar="NAME_OR_FILE[:N],…",
            parser=user_names,
            help="Prompts over which whole steps are timed.",
            show_default="demo:4; with --quick demo:2",
        ),
    ] = None,
    data_dir: DataDirs = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=2, help="Maximum tokens per answer.", show_default="64; with --quick 32")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="In about 20 seconds instead of one or two minutes, for a small model.")
    ] = False,
    json_file: JsonFile = None,
    plot: PlotFile = None,
    generation_config: FollowConfig = True,
) -> None:
    """Measure where time goes: forwards by width and context beside what the machine could do, a head's levels, and
    whole steps by phase.

    Run it with nothing beside it.
    """
    from tercel.decode.generation_config import Asked
    from tercel.decode.stopwatch import Patience
    from tercel.measure.profile import CONTEXTS, USUAL_CONTEXT, ProfileSettings, run_profile
    from tercel.measure.profile_report import ceilings_line, plot_profile, profile_tables
    from tercel.measure.profile_verdict import verdict
    from tercel.measure.report import check_picture
    from tercel.measure.tasks import first_prompts, parse_tasks

    if plot is not None:
        check_picture(plot)
    settings = ProfileSettings(
        widths=_numbers(widths, "--widths", "1,8,64"),
        contexts=_numbers(contexts, "--contexts", "64,1024"),
        usual_contexts=(USUAL_CONTEXT,) if quick else CONTEXTS,
        patience=Patience(8.0, most=12) if quick else Patience(45.0),
    )
    given = {"temperature": 0.0, "max_new_tokens": max_new_tokens or (32 if quick else 64)}
    wanted = Asked(given, generation_config=generation_config)
    asked = parse_tasks(tasks or ("demo:2" if quick else "demo:4"), tuple(data_dir or ()))
    loaded = open_target(target, model)
    settings = replace(settings, params=open_sampling(wanted, loaded))
    proposers = _proposers(loaded, head, draft)
    with counting_bar("profile") as bar:
        profile = run_profile(
            loaded,
            proposers,
            first_prompts(loaded.tokenizer, asked),
            settings,
            lambda stage, done, total: bar(done, total, stage),
        )
    try:  # files first: a screen may fail
        if json_file is not None:
            write_json(json_file, {**profile.to_json(), "verdict": verdict(profile)})
        if plot is not None:
            plot_profile(profile, plot)
    finally:
        console = result_console(json_file, plot)
        console.print_line(profile.title())
        for table in profile_tables(profile):
            console.print(table)
        for line in (ceilings_line(profile), *profile.notes, verdict(profile)):
            console.print_line(line)
        say_notes(*proposers.values())


def _proposers(target: Target, head: str | None, options: DraftOptions) -> dict[str, Proposer]:
    """Token by token, and what `--draft` asks for; without a head, if none is named and none is shipped.

    Raises `TercelError` as `open_proposer`.
    """
    proposers = {VANILLA: make_proposer(VANILLA, target)}
    if head is None and "head" in proposer_kind(options.method).needs and shipped(target.source.name) is None:
        say(f"note: no head is given and none is shipped for {target.source.name}; steps are timed without drafts")
    elif options.method != VANILLA:
        proposers[options.method] = open_proposer(head, target, options)
    return proposers


def _numbers(text: str | None, option: str, example: str) -> tuple[int, ...] | None:
    return None if text is None else parse_numbers(text, option, f"numbers of tokens, such as {example}")
