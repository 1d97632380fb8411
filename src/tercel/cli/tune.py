"""`tercel tune`: the best setting for one's own prompts, here or in another engine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tercel import limits
from tercel.cli.consoles import counting_bar, result_console
from tercel.cli.groups import with_groups
from tercel.cli.models import open_head, open_sampling, open_target, ready_proposer
from tercel.cli.options import (
    DataDirs,
    DecodingModelOptions,
    DraftOptions,
    HeadName,
    JsonFile,
    LayerIds,
    LayerIdsOption,
    PlotFile,
    TargetName,
)
from tercel.cli.paths import tercel_command, user_names
from tercel.cli.sampling_options import FollowConfig, Sample, Temperature
from tercel.cli.tune_engine import ThereOptions, tune_there, what_is_known
from tercel.decode.proposers import EAGLE3, VANILLA, make_proposer
from tercel.errors import TercelError
from tercel.files import write_json
from tercel.heads import known_as
from tercel.interop.engines import ENGINES

if TYPE_CHECKING:
    from tercel.decode.proposer import Proposer
    from tercel.decode.sampling import SamplingParams
    from tercel.draft import DraftModel
    from tercel.measure.tasks import Task
    from tercel.measure.tune_here import Tuning
    from tercel.target_model.model import Target

HERE = "tercel"
if TYPE_CHECKING:  # which sees no members that come from a list
    TunedEngine = StrEnum
else:
    TunedEngine = StrEnum("TunedEngine", {name: name for name in (HERE, *ENGINES)})
_HERE = "Measured here (--engine tercel)"


@dataclass(frozen=True)
class HereOptions:
    """How settings are tried here. None is left out."""

    minutes: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            max=1440,
            help="How long it may take, once the models are loaded.",
            show_default="5",
            rich_help_panel=_HERE,
        ),
    ] = None
    slots: Annotated[
        int | None,
        typer.Option(
            min=1, max=limits.SLOTS, help="Requests decoded at a time.", show_default="1", rich_help_panel=_HERE
        ),
    ] = None
    candidates: Annotated[
        str | None,
        typer.Option(
            metavar="TREE,…",
            help="What is tried beside no drafts and auto, as --tree takes it.",
            show_default="chains of 1 to 8 and seven trees",
            rich_help_panel=_HERE,
        ),
    ] = None


@with_groups
def command(
    target: TargetName,
    data: Annotated[
        str,
        typer.Option(
            metavar="FILE_OR_NAME[:N],…",
            parser=user_names,
            help="Your prompts: JSONL with messages, turns or prompt; evaluation sets by name.",
            show_default=False,
        ),
    ],
    model: DecodingModelOptions,
    here: HereOptions,
    there: ThereOptions,
    head: HeadName = None,
    data_dir: DataDirs = None,
    engine: Annotated[TunedEngine, typer.Option(help="What will run the head.")] = TunedEngine(HERE),
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Maximum tokens per answer.")] = 128,
    temperature: Temperature = None,
    sample: Sample = False,
    seed: Annotated[int, typer.Option(help="Makes sampling repeatable.")] = 0,
    layer_ids: LayerIdsOption = LayerIds.auto,
    force_head: Annotated[
        bool, typer.Option("--force-head", help="Accept a head trained for other weights of the same shape.")
    ] = False,
    json_file: JsonFile = None,
    plot: PlotFile = None,
    generation_config: FollowConfig = True,
) -> None:
    """Find the best draft setting for your own prompts, with 95 % intervals, or learn that drafting does not pay.

    Here, settings answer the prompts in turn and the slower half goes, round by round; run it with nothing beside it.
    For another engine it is simulated how many drafts it would accept; what its steps cost is told with --cost-json or
    --url.
    """
    for name, given in vars(there if engine.value == HERE else here).items():
        if given is not None:
            option = f"--{name.replace('_', '-')}"
            where = "another --engine" if engine.value == HERE else f"--engine {HERE}"
            raise TercelError(f"{option} is for {where}; leave it out, or name that")
    from tercel.decode.generation_config import Asked
    from tercel.measure.report import check_picture
    from tercel.measure.tasks import parse_tasks
    from tercel.measure.tune import parse_candidates

    if plot is not None:
        check_picture(plot)
    names = None if here.candidates is None else parse_candidates(here.candidates)
    given_values = {"temperature": temperature, "seed": seed, "max_new_tokens": max_new_tokens}
    wanted = Asked(given_values, sample, generation_config)
    asked = parse_tasks(data, tuple(data_dir or ()))
    options = DraftOptions(layer_ids=layer_ids, force_head=force_head)
    server, costs = what_is_known(there, engine.value)
    loaded = open_target(target, model)
    params = open_sampling(wanted, loaded)
    draft_model = open_head(head, loaded, options)
    if engine.value != HERE:
        tune_there(ENGINES[engine.value], there, server, costs, loaded, draft_model, asked, params, json_file, plot)
        return
    found = _tune(loaded, draft_model, asked, params, names, here, options)
    words = [*flags_of(model), *flags_of(options)]
    words += ["--temperature", str(temperature)] if temperature is not None else []
    words += ["--sample"] if sample else []
    words += [] if generation_config else ["--no-generation-config"]
    line = _line(found, loaded, head, data, words)
    _show(found, line, json_file, plot)


def _tune(
    target: Target,
    head: DraftModel,
    tasks: Sequence[Task],
    params: SamplingParams,
    names: tuple[str, ...] | None,
    here: HereOptions,
    options: DraftOptions,
) -> Tuning:
    from tercel.measure.tune import candidates
    from tercel.measure.tune_here import TuneSettings, tune

    settings = TuneSettings(
        names=candidates(target.tree_support.tree) if names is None else names,
        params=params,
        slots=here.slots or 1,
        minutes=here.minutes or 5.0,
        head=known_as(head.path),
    )

    def make(name: str) -> Proposer:
        if name == VANILLA:
            return make_proposer(VANILLA, target)
        return ready_proposer(EAGLE3, target, head, replace(options, tree=name), settings.slots)

    with counting_bar("seconds") as bar:
        return tune(target, make, tasks, settings, lambda done, total, name: bar(int(done), int(total), name))


def _line(found: Tuning, target: Target, head: str | None, data: str, words: Sequence[str]) -> str:
    """The command that uses what was found: one that answers as many requests at a time as were tried."""
    name, setting = target.source.name, found.verdict.setting
    from tercel.measure.tune import as_flags

    drafting = as_flags(setting).split()
    heads = [] if head is None or setting == VANILLA else [head]
    slots = found.settings.slots
    if slots > 1:
        named = (data, data.rpartition(":")[0])  # as a task is, with or without a number of questions
        prompts = next((file for file in named if os.path.isfile(file)), "prompts.jsonl")
        asked = ["--target", name, *(["--head", *heads] if heads else []), "--in-flight", str(slots)]
        return tercel_command("data", "regenerate", prompts, "--out", "answers.jsonl", *asked, *drafting, *words)
    verb = "chat" if target.tokenizer.chat_template else "generate"
    raw = [] if target.tokenizer.chat_template else ["--raw"]
    return tercel_command(verb, name, *heads, *drafting, *raw, *words)


def flags_of(options: Any) -> list[str]:
    """A group of options as words of a command line, without those that are as they are anyway."""
    words: list[str] = []
    for each in fields(options):
        value, flag = getattr(options, each.name), f"--{each.name.replace('_', '-')}"
        if value == each.default:
            continue
        many = value if isinstance(value, list) else [value]
        words += [flag] if value is True else [word for one in many for word in (flag, str(one))]
    return words


def _show(found: Tuning, line: str, json_file: Path | None, plot: Path | None) -> None:
    from tercel.measure.tune_report import plot_tuning, tuning_table

    try:  # files first: a screen may fail
        if json_file is not None:
            write_json(json_file, {**found.to_json(), "command": line})
        if plot is not None:
            plot_tuning(found, plot)
    finally:
        console = result_console(json_file, plot)
        console.print(tuning_table(found))
        for note in found.notes():
            console.print_line(f"note: {note}")
        console.print_line(found.verdict.sentence, "bold")
        console.print_text([(f"{line}\n", "")])
