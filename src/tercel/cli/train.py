"""`tercel train`: a draft head for a target, from conversations."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from tercel.cli.consoles import PlainConsole, result_console, unseen
from tercel.cli.data import counts_table
from tercel.cli.groups import with_groups
from tercel.cli.models import given_device, open_target
from tercel.cli.options import Conversations, ModelOptions, PlainText, TargetName
from tercel.cli.paths import tercel_command, user_path
from tercel.cli.settings import only_in_files, read_settings
from tercel.cli.train_plan import print_plan
from tercel.cli.train_progress import TrainProgress
from tercel.errors import TercelError
from tercel.files import write_json
from tercel.stopping import stopped
from tercel.target_model.backend_names import NONE
from tercel.train.config import EAGLE3, TrainConfig
from tercel.train.trackers import TrackerName, find_tracker, tracked

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tercel.chat import TokenizedChat
    from tercel.measure.forecast import Forecast
    from tercel.target_model.model import Target
    from tercel.train.loop import TrainSummary

_OF_DATA = ("limit", "last-turn", "check-overlap", "data-licence")  # beside those of `TrainConfig`
_IN_FILES = ", ".join(sorted([*_OF_DATA, *(n.replace("_", "-") for n, s in TrainConfig.told().items() if not s.flag)]))


@with_groups
def command(
    target: TargetName,
    data: Conversations,
    out: Annotated[Path, typer.Option(metavar="DIR", parser=user_path, help="Where the head and its run go.")],
    recipe: TrainConfig,
    model: ModelOptions,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.yaml",
            parser=user_path,
            callback=read_settings,
            is_eager=True,
            help=f"Settings from a YAML file, under the names of the flags. There also: {_IN_FILES}.",
        ),
    ] = None,
    plain: PlainText = False,
    limit: Annotated[
        int | None,
        typer.Option(min=1, help="Read at most that many rows of each source.", hidden=True, callback=only_in_files),
    ] = None,
    last_turn: Annotated[
        bool,
        typer.Option(
            help="Learn from the answer to the last question alone.", hidden=True, callback=only_in_files
        ),
    ] = False,
    check_overlap: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="EVALFILE",
            parser=user_path,
            help="Drop conversations that overlap with these files.",
            hidden=True,
            callback=only_in_files,
        ),
    ] = None,
    data_licence: Annotated[
        str,
        typer.Option(
            metavar="TEXT", help="Licence of the data, for the model card.", hidden=True, callback=only_in_files
        ),
    ] = "",
    features: Annotated[
        Path | None,
        typer.Option(metavar="DIR", parser=user_path, help="Read the target's features that `tercel features` made."),
    ] = None,
    report_to: Annotated[
        TrackerName | None,
        typer.Option(help="Follow the run there too; each is an extra of this name.", show_default=False),
    ] = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="Only tell what the run would take: time, disk, memory, expected τ.")
    ] = False,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json",
            metavar="FILE",
            parser=user_path,
            help="Write the forecast there as JSON; - means standard output.",
            show_default=False,
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start over, replacing the run in --out.")] = False,
) -> None:
    """Train a draft head; the same command resumes a stopped run. Under torchrun, several processes train one."""
    from tercel.chat import OverlapIndex, load_chats, read_eval_prompts
    from tercel.chat.dates import as_of
    from tercel.target_model.sources import check_device
    from tercel.train.group import Place, joined
    from tercel.train.loop import train

    tracker = None if report_to is None else find_tracker(report_to)
    if json_file is not None and not plan:
        raise TercelError("--json is for a forecast; give --plan with it")
    place = Place.of(os.environ)
    if place is not None:  # one of several processes, each with a device of its own
        if plan:
            raise TercelError("--plan tells of one process; give it without torchrun")
        model = replace(model, device=str(check_device(place.device(given_device(model)))))
    with joined(place, model.device) as ranks, unseen() if ranks.rank else nullcontext():
        console = result_console(json_file)
        loaded = open_target(target, model, sharding=recipe.target_sharding)
        if features is not None and not plan and loaded.sharding == NONE:
            loaded.drop_blocks()
        against = OverlapIndex.of(read_eval_prompts(check_overlap)) if check_overlap else None
        moment = ranks.gather(None if ranks.rank else rendering_moment(loaded.tokenizer, out, overwrite, features))[0]
        tokenizer = loaded.tokenizer if moment is None else as_of(loaded.tokenizer, moment)
        chats, report = load_chats(
            data,
            tokenizer,
            max_length=recipe.max_length,
            limit=limit,
            plain=plain,
            last_turn=last_turn,
            against=against,
        )
        console.print(counts_table(report))
        if moment is not None:
            console.print_line(f"note: the chat template writes the date; all of this run uses {moment:%Y-%m-%d}")
        for note in report.notes:
            console.print_line(f"note: {note}")
        if plan:
            print_plan(console, _forecast(loaded, chats, recipe, out, features is not None, json_file))
            return
        follows = None if ranks.rank else tracker
        with TrainProgress(console, out) as progress, tracked(follows, progress, out, recipe) as watcher:
            try:
                summary = train(
                    loaded,
                    chats,
                    recipe,
                    out,
                    watcher=None if ranks.rank else watcher,
                    features=features,
                    overwrite=overwrite,
                    data_names=[Path(name).name if Path(name).exists() else name for name in data],
                    data_licence=data_licence,
                    rendered_at=moment,
                    ranks=ranks,
                )
            except KeyboardInterrupt as stop:
                raise stopped(stop, f"stopped; {out} keeps the run; the same command resumes it") from None
        if ranks.rank == 0:
            progress.draw_curves()
            print_summary(console, summary, target, recipe.method)


def _forecast(
    target: Target, chats: Sequence[TokenizedChat], recipe: TrainConfig, out: Path, cached: bool, json_file: Path | None
) -> Forecast:
    """What the run would take, and where it is wanted as JSON that too."""
    from tercel.measure.forecast import forecast
    from tercel.train.prepare import prepare

    found = forecast(target, prepare(target, chats, recipe), recipe, out, cached=cached)
    if json_file is not None:
        write_json(json_file, found.to_json())
    return found


def rendering_moment(
    tokenizer: PreTrainedTokenizerBase, out: Path, overwrite: bool, features: Path | None = None
) -> datetime | None:
    """What the chat template takes for now: the moment of the run in `out` if there is one, else that of the features,
    else this one. None for a template that writes no date. Raises `TercelError` if the run's is lost."""
    from tercel.chat.dates import this_moment, writes_date
    from tercel.train import feature_store
    from tercel.train.moment import recorded_moment
    from tercel.train.run_folder import RunFolder

    if not writes_date(tokenizer):
        return None
    recorded = None if overwrite else recorded_moment(RunFolder(out))
    if recorded is None and features is not None:
        recorded = feature_store.recorded_moment(features)
    return recorded or this_moment()


def print_summary(console: PlainConsole, summary: TrainSummary, target: str, method: str = EAGLE3) -> None:
    """What the run gave, where it lies, and what to do with it."""
    from tercel.train.run_folder import RunFolder

    best, folder = summary.best, RunFolder(summary.out)
    table = Table(title="held-out acceptance of the best head", title_justify="left")
    table.add_column("τ", justify="right")
    for n in range(len(best.alpha)):
        table.add_column(f"{n}-α", justify="right")
    table.add_row(f"{best.tau:.3f}", *(f"{value:.3f}" for value in best.alpha))
    console.print(table)
    for note in summary.notes:
        console.print_line(f"note: {note}")
    lines = [
        f"{summary.steps:,} steps, {summary.tokens:,} tokens in {summary.seconds:,.0f} s",
        f"head    {summary.out}",
        f"card    {summary.out / 'README.md'}",
    ]
    if folder.curves.is_file():
        lines.append(f"curves  {folder.curves}")
    lines += ["", *next_commands(target, str(summary.out), method)]
    for line in lines:
        console.print_line(line)


def next_commands(target: str, head: str, method: str = EAGLE3) -> Sequence[str]:
    drafting = () if method == EAGLE3 else ("--draft", method)
    compared = () if method == EAGLE3 else ("--methods", f"vanilla,{method}")
    return (
        tercel_command("generate", target, head, *drafting, "--show", "--prompt", "Why is the sky blue?"),
        tercel_command("bench", target, head, *compared),
        tercel_command("verify", target, head, *drafting),
    )
