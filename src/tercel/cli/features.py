"""`tercel features`: what training needs of a target for given conversations, made once and kept."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tercel.cli.consoles import counting_bar, result_console
from tercel.cli.groups import with_groups
from tercel.cli.models import open_target
from tercel.cli.options import Conversations, ModelOptions, PlainText, TargetName
from tercel.cli.paths import tercel_command, user_path
from tercel.cli.settings import parse_layers
from tercel.train.config import TrainConfig

if TYPE_CHECKING:
    from tercel.train.make_features import FeaturePlan


class Store(StrEnum):
    bf16 = "bf16"
    float8 = "float8"
    int8 = "int8"


@with_groups
def command(
    target: TargetName,
    data: Conversations,
    out: Annotated[Path, typer.Option(metavar="DIR", parser=user_path, help="Where the features go.")],
    model: ModelOptions,
    store: Annotated[
        Store, typer.Option(help="How numbers are kept; those of 8 bits have a scale a row and layer.")
    ] = Store.bf16,
    feature_layers: Annotated[
        str,
        typer.Option(
            metavar="N,N,N",
            help="Layers whose inputs are the features.",
            show_default="a low, a middle and a high one",
        ),
    ] = "",
    max_length: Annotated[
        int, typer.Option(min=1, help="Cut longer conversations, in tokens, as train will.")
    ] = TrainConfig.max_length,
    plain: PlainText = False,
    last_turn: Annotated[
        bool, typer.Option("--last-turn", help="For training that learns from the last answer alone.")
    ] = False,
    all_tokens: Annotated[
        bool, typer.Option("--all-tokens", help="For training that learns from prompts too (prompt-weight).")
    ] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="Read at most that many rows of each source.")] = None,
    check_overlap: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="EVALFILE", parser=user_path, help="Drop conversations that overlap with it; may be repeated."
        ),
    ] = None,
) -> None:
    """Make the features of conversations for `train --features`; the same command resumes a stopped run."""
    from tercel.chat import OverlapIndex, load_chats, read_eval_prompts
    from tercel.chat.dates import as_of, this_moment, writes_date
    from tercel.target_model.structure import default_feature_layers
    from tercel.train.feature_store import recorded_moment
    from tercel.train.make_features import make_features

    layers = parse_layers(feature_layers)
    console = result_console()
    loaded = open_target(target, model)
    moment = recorded_moment(out) or this_moment() if writes_date(loaded.tokenizer) else None
    tokenizer = loaded.tokenizer if moment is None else as_of(loaded.tokenizer, moment)
    against = OverlapIndex.of(read_eval_prompts(check_overlap)) if check_overlap else None
    chats, report = load_chats(
        data, tokenizer, max_length=max_length, limit=limit, plain=plain, last_turn=last_turn, against=against
    )
    for note in report.notes:
        console.print_line(f"note: {note}")
    with counting_bar("tokens") as bar:
        plan: FeaturePlan | None = None

        def planned(forecast: FeaturePlan) -> None:
            nonlocal plan
            plan = forecast
            for line in _forecast(forecast):
                console.print_line(line)

        def done(tokens: int) -> None:
            bar(tokens, plan.tokens if plan else tokens, "")

        try:
            make_features(
                loaded,
                chats,
                layers or default_feature_layers(loaded.num_layers),
                out,
                max_length=max_length,
                store=store.value,
                all_tokens=all_tokens,
                rendered_at=None if moment is None else moment.isoformat(timespec="seconds"),
                planned=planned,
                on_progress=done,
            )
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"stopped; {out} keeps what is made; the same command resumes") from None
    console.print_line(tercel_command("train", target, "--data", *data, "--features", str(out), "--out", "my-head"))


def _forecast(plan: FeaturePlan) -> list[str]:
    lines = [
        f"{plan.conversations:,} conversations of {plan.tokens:,} tokens take {plan.bytes / 1e9:,.2f} GB; "
        f"{plan.free / 1e9:,.2f} GB are free"
    ]
    if plan.there:
        lines.append(f"{plan.there:,} more conversations have their features already")
    return lines
