"""`tercel train`: a draft head for a target, from conversations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from tercel.cli.consoles import PlainConsole, result_console
from tercel.cli.data import counts_table
from tercel.cli.groups import with_groups
from tercel.cli.models import open_target
from tercel.cli.options import ModelOptions, TargetName
from tercel.cli.paths import tercel_command, user_name, user_path
from tercel.cli.settings import read_settings
from tercel.cli.train_progress import TrainProgress
from tercel.errors import TercelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tercel.train.config import TrainConfig
    from tercel.train.loop import TrainSummary

_RECIPE, _LOSS, _HEAD, _RUN = "Recipe", "Loss", "Head", "Run"


def _flag(help: str, panel: str, **more: object) -> typer.models.OptionInfo:
    return typer.Option(help=help, rich_help_panel=panel, **more)  # type: ignore[arg-type]


@dataclass(frozen=True)
class TrainFlags:
    """`TrainConfig` as flags, name by name; a test compares names and defaults."""

    epochs: Annotated[int, _flag("Passes over the data.", _RECIPE)] = 2
    max_steps: Annotated[int, _flag("End after so many optimizer steps; 0 is all epochs.", _RECIPE)] = 0
    batch_tokens: Annotated[int, _flag("Packed tokens of a micro-batch.", _RECIPE)] = 2048
    accumulate: Annotated[int, _flag("Micro-batches of an optimizer step.", _RECIPE)] = 1
    lr: Annotated[float, _flag("Peak learning rate.", _RECIPE)] = 5e-4
    final_lr: Annotated[float, _flag("Share of it at the end of the cosine.", _RECIPE)] = 0.05
    warmup: Annotated[float, _flag("Share of the steps spent warming up.", _RECIPE)] = 0.04
    weight_decay: Annotated[float, _flag("AdamW's weight decay.", _RECIPE)] = 0.0
    clip: Annotated[float, _flag("Largest norm of the gradient.", _RECIPE)] = 0.5
    max_length: Annotated[int, _flag("Cut longer conversations, in tokens.", _RECIPE)] = 2048
    ttt_steps: Annotated[int, _flag("Steps of the training-time test.", _LOSS)] = 7
    decay: Annotated[float, _flag("Step s weighs decay^s; 0 is the plain mean.", _LOSS)] = 0.8
    loss: Annotated[str, _flag("soft, hard or lk.", _LOSS)] = "soft"
    oov: Annotated[str, _flag("drop or keep rows outside the draft vocabulary.", _LOSS)] = "drop"
    average: Annotated[str, _flag("Mean over sequence or token.", _LOSS)] = "sequence"
    draft_vocab: Annotated[int, _flag("Tokens the head can draft; 0 is all.", _HEAD)] = 8192
    feature_layers: Annotated[
        str,
        _flag(
            "Layers whose inputs are the features, such as 2,15,27.",
            _HEAD,
            metavar="IDS",
            show_default="a low, a middle and a high one",
        ),
    ] = ""
    freeze_lm_head: Annotated[bool, _flag("Keep the target's output layer (paper's text).", _HEAD)] = False
    fc_norm: Annotated[bool, _flag("Norm each feature first (EAGLE-3.1).", _HEAD)] = False
    norm_output: Annotated[bool, _flag("Feed back the normed hidden (EAGLE-3.1).", _HEAD)] = False
    start_from: Annotated[
        str, _flag("Begin with the weights of this head.", _RUN, metavar="HEAD", parser=user_name)
    ] = ""
    seed: Annotated[int, _flag("Of initialisation and data order.", _RUN)] = 0
    eval_share: Annotated[float, _flag("Share of the conversations held out.", _RUN)] = 0.02
    eval_every: Annotated[int, _flag("Steps between evaluations.", _RUN)] = 100
    save_every: Annotated[int, _flag("Steps between saved states.", _RUN)] = 100

    def config(self) -> TrainConfig:
        """Raises `TercelError` for values outside their range."""
        from tercel.train.config import TrainConfig

        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return TrainConfig(**{**values, "feature_layers": parse_layers(self.feature_layers)})


@with_groups
def command(
    target: TargetName,
    data: Annotated[
        list[str],
        typer.Option(
            metavar="FILE", parser=user_name, help="Conversations: a file, a data set's name, org/name of the Hub."
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", parser=user_path, help="Where the head and its run go.")],
    recipe: TrainFlags,
    model: ModelOptions,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.yaml",
            parser=user_path,
            callback=read_settings,
            is_eager=True,
            help="Flags from a YAML file.",
        ),
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help='Take {"text"} rows as plain text for a base model.')] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="Read at most that many rows of each source.")] = None,
    check_overlap: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="EVALFILE", parser=user_path, help="Drop conversations that overlap with it; may be repeated."
        ),
    ] = None,
    data_licence: Annotated[
        str, typer.Option(metavar="TEXT", help="Licence of the data, for the model card.", show_default=False)
    ] = "",
    feature_cache: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", parser=user_path, help="Keep the target's features there for later epochs and runs."
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Begin anew, in place of the run in --out.")] = False,
) -> None:
    """Train a draft head; the same command again goes on where a stopped run left off."""
    settings = recipe.config()
    from tercel.chat import OverlapIndex, load_chats, read_eval_prompts
    from tercel.chat.dates import as_of
    from tercel.train.loop import train

    console = result_console()
    loaded = open_target(target, model)
    against = OverlapIndex.of(read_eval_prompts(check_overlap)) if check_overlap else None
    moment = rendering_moment(loaded.tokenizer, out, overwrite)
    tokenizer = loaded.tokenizer if moment is None else as_of(loaded.tokenizer, moment)
    chats, report = load_chats(
        data, tokenizer, max_length=settings.max_length, limit=limit, plain=plain, against=against
    )
    console.print(counts_table(report))
    if moment is not None:
        console.print_line(f"note: the chat template writes the date, and {moment:%Y-%m-%d} is it for all of this run")
    for note in report.notes:
        console.print_line(f"note: {note}")
    with TrainProgress(console, out) as progress:
        try:
            summary = train(
                loaded,
                chats,
                settings,
                out,
                watcher=progress,
                feature_cache=feature_cache,
                overwrite=overwrite,
                data_names=[Path(name).name if Path(name).exists() else name for name in data],
                data_licence=data_licence,
                rendered_at=moment,
            )
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"stopped; {out} keeps the run, and the same command again goes on with it"
            ) from None
    progress.draw_curves()
    print_summary(console, summary, target)


def rendering_moment(tokenizer: PreTrainedTokenizerBase, out: Path, overwrite: bool) -> datetime | None:
    """What the chat template takes for now: the moment of the run in `out` if there is one, else this one. None for a
    template that writes no date."""
    from tercel.chat.dates import this_moment, writes_date
    from tercel.train.journal import Journal
    from tercel.train.run_folder import RunFolder

    if not writes_date(tokenizer):
        return None
    recorded = None if overwrite else Journal(RunFolder(out).metrics).rendered_at()
    return recorded or this_moment()


def parse_layers(text: str) -> tuple[int, ...]:
    """`"2,15,27"` to `(2, 15, 27)`. Raises `TercelError` for anything else."""
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise TercelError(f"--feature-layers {text!r} is not a list of layer numbers, such as 2,15,27") from error


def print_summary(console: PlainConsole, summary: TrainSummary, target: str) -> None:
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
    lines += ["", *next_commands(target, str(summary.out))]
    for line in lines:
        console.print_line(line)


def next_commands(target: str, head: str) -> Sequence[str]:
    return (
        tercel_command("generate", target, head, "--show", "--prompt", "Why is the sky blue?"),
        tercel_command("bench", target, head),
        tercel_command("verify", target, head),
    )
