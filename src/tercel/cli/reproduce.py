"""`tercel reproduce`: the experiments of the EAGLE-3 paper, and its claims judged by rules fixed before the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from tercel.cli.consoles import PlainConsole, counting_bar, result_console, say
from tercel.cli.entrants import open_heads
from tercel.cli.groups import with_groups
from tercel.cli.models import open_draft_model, open_target
from tercel.cli.options import DataDirs, DecodingModelOptions, DraftOptions, Dtype, HeadsFile
from tercel.cli.paths import tercel_command, user_name, user_path
from tercel.errors import TercelError

if TYPE_CHECKING:
    from tercel.reproduce.claims import Judged
    from tercel.reproduce.experiments import Measured
    from tercel.reproduce.heads import Workshop
    from tercel.reproduce.results import Result
    from tercel.reproduce.scales import Scale
    from tercel.reproduce.world import World

CLAIMS = "claims"
OUT, RUNS = Path("docs/reproduction"), Path("runs/reproduce")


class ScaleName(StrEnum):
    tiny = "tiny"
    small = "small"
    full = "full"


@dataclass(frozen=True)
class Sizes:
    """What a run changes of its scale."""

    questions: Annotated[
        int | None, typer.Option(min=2, help="Questions of each task.", show_default="of the scale")
    ] = None
    max_new_tokens: Annotated[
        int | None, typer.Option(min=2, help="Maximum tokens per answer.", show_default="of the scale")
    ] = None
    seeds: Annotated[
        int | None, typer.Option(min=1, help="How often a question is asked at T=1.", show_default="of the scale")
    ] = None
    rounds: Annotated[
        int | None, typer.Option(min=2, help="Rounds of each batch size.", show_default="of the scale")
    ] = None
    steps: Annotated[
        int | None, typer.Option(min=1, help="Training steps of every head.", show_default="of the scale")
    ] = None

    def of(self, scale: Scale) -> Scale:
        found: dict[str, Any] = {
            "questions": self.questions,
            "tokens": self.max_new_tokens,
            "seeds": self.seeds,
            "rounds": self.rounds,
            "recipe": None if self.steps is None else {**scale.recipe, "max_steps": self.steps},
        }
        return replace(scale, **{name: given for name, given in found.items() if given is not None})


@with_groups
def command(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="table1, table2, table3, fig1, fig4, fig7, depth, robust; claims judges all of them."
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


@dataclass(frozen=True)
class Places:
    out: Path
    runs: Path


@dataclass(frozen=True)
class Given:
    """The command line, as far as results hang on it."""

    scale: str
    sizes: Sizes
    model: DecodingModelOptions
    target: str | None
    heads: Path | None
    data: tuple[str, ...]
    data_dir: tuple[Path, ...]
    draft_model: str | None

    def command(self, name: str) -> str:
        """The line that does an experiment again."""
        words = ["reproduce", name, "--scale", self.scale]
        for flag, value in (("--target", self.target), ("--heads", self.heads), ("--draft-model", self.draft_model)):
            words += [] if value is None else [flag, str(value)]
        words += [word for file in self.data for word in ("--data", file)]
        words += [word for folder in self.data_dir for word in ("--data-dir", str(folder))]
        for field, value in vars(self.sizes).items():
            words += [] if value is None else [f"--{field.replace('_', '-')}", str(value)]
        return tercel_command(*words, *words_of(self.model))


def words_of(model: DecodingModelOptions) -> list[str]:
    """What of these options is not left at its default, as it would be typed."""
    words = []
    for field in fields(model):
        value = getattr(model, field.name)
        if value != field.default:
            flag = f"--{field.name.replace('_', '-')}"
            values = value if isinstance(value, list) else [value]
            words += [word for one in values for word in ([flag] if one is True else [flag, str(one)])]
    return words


@dataclass(frozen=True)
class Setting:
    """All that is known before anything is loaded. tasks: files or names."""

    workshop: Workshop
    model: DecodingModelOptions
    draft_model: str | None
    tasks: Mapping[str, str]
    data_dir: tuple[Path, ...]
    journals: Path

    def train(self, names: Sequence[str]) -> None:
        """Every head that these experiments lack and that can be trained; says before what it will cost."""
        from tercel.reproduce.experiments import EXPERIMENTS
        from tercel.reproduce.scales import TINY

        wanted = [each for name in names for each in EXPERIMENTS[name].names]
        recipes = self.workshop.to_train(wanted)
        if not recipes:
            return
        sizes = self.workshop.scale.recipe
        say(
            f"{len(recipes)} heads are trained first ({', '.join(recipes)}), each {sizes['max_steps']:,} steps of "
            f"{sizes['batch_tokens']:,} tokens; they are kept in {self.workshop.folder}"
        )
        if self.workshop.scale.name != TINY:
            self.workshop.plan(recipes[0], run_here)
        for recipe in recipes:
            self.workshop.train(recipe, run_here)

    def open(self, progress: Any) -> World:
        from tercel.measure.tasks import load_task
        from tercel.reproduce.world import World

        target = open_target(self.workshop.target, self.model)
        options = DraftOptions(draft_model=self.draft_model)
        tasks = {name: load_task(spec, self.data_dir) for name, spec in self.tasks.items()}
        return World(
            target,
            open_draft_model(target, options),
            open_heads(target, options),
            self.workshop,
            tasks,
            self.journals,
            say,
            progress,
        )

    def told(self, world: World) -> dict[str, Any]:
        """What results hang on."""
        import torch

        from tercel.measure.entrants import digest_of_questions
        from tercel.measure.machine import versions

        scale = self.workshop.scale
        return {
            "scale": scale.name,
            "target": world.target.source.name,
            "weights": world.target.fingerprint,
            "dtype": str(world.target.dtype).removeprefix("torch."),
            "backend": world.target.backend,
            "draft model": None if world.model is None else world.model.fingerprint,
            "threads": torch.get_num_threads(),
            "questions": scale.questions,
            "tasks": {name: digest_of_questions(task) for name, task in world.tasks.items()},
            "max_new_tokens": scale.tokens,
            "seeds": scale.seeds,
            "rounds": scale.rounds,
            "training": dict(scale.recipe),
            "heads": {name: entry.head for name, entry in self.workshop.manifest.items()},
            "data": list(self.workshop.data),
            "versions": versions(),
        }


def prepared(given: Given, places: Places) -> Setting:
    """What is there for these options; the tiny model, its questions and answers are made."""
    from tercel.heads import shipped
    from tercel.measure.manifest import read_manifest
    from tercel.reproduce.heads import Workshop
    from tercel.reproduce.scales import PAPER_TASKS, ROBUST_TASKS, SCALES, TINY
    from tercel.target_model.sources import load_config

    scale, model = given.sizes.of(SCALES[given.scale]), given.model
    manifest = {} if given.heads is None else read_manifest(given.heads)
    target, draft_model, data = given.target or scale.target, given.draft_model, given.data
    names = (*PAPER_TASKS, *ROBUST_TASKS)
    if given.scale == TINY:
        model = replace(model, dtype=model.dtype or Dtype.float32)
        target, draft_model, data, tasks = _tiny(given, scale, places.runs, names)
    else:
        tasks = {name: name for name in names if _is_there(name, given.data_dir)}
    assert target is not None
    config = load_config(target).get_text_config()
    more = [] if model.dtype is None else ["--dtype", model.dtype.value]
    own_head = "eagle3" not in manifest and shipped(target) is not None
    workshop = Workshop(
        scale,
        target,
        config.num_hidden_layers,
        data,
        places.runs,
        manifest,
        more if model.device == "auto" else [*more, "--device", model.device],
        own_head,
        draft_model is not None,
    )
    return Setting(workshop, model, draft_model, tasks, given.data_dir, places.runs / "journals")


def _tiny(
    given: Given, scale: Scale, folder: Path, names: Sequence[str]
) -> tuple[str, str, tuple[str, ...], dict[str, str]]:
    """Target, second model, answers to learn from, and tasks."""
    from tercel.reproduce.tiny import tiny_target, write_questions

    target = given.target or tiny_target(folder / "target")
    second = given.draft_model or tiny_target(folder / "second", layers=1)
    tasks = {
        name: str(write_questions(folder / "tasks" / f"{name}.jsonl", max(2, scale.questions), seed, 1 + (not seed)))
        for seed, name in enumerate(names)
    }
    if given.data:
        return target, second, given.data, tasks
    prompts = write_questions(folder / "prompts.jsonl", 48, len(names))
    answers = folder / "answers.jsonl"
    if not answers.is_file():
        asked = ["data", "regenerate", str(prompts), "--target", target, "--out", str(answers)]
        run_here([*asked, "--max-new-tokens", "32", "--dtype", "float32"])
    return target, second, (str(answers),), tasks


def _is_there(name: str, folders: Sequence[Path]) -> bool:
    from tercel.measure.tasks import SUBFOLDERS

    return any((folder / sub / f"{name}.jsonl").is_file() for folder in folders for sub in SUBFOLDERS)


def run_here(words: Sequence[str]) -> None:
    """A command of this program, as if it were typed. Raises its exit, if that is not 0."""
    from tercel.cli.app import app

    say(f"$ {tercel_command(*words)}")
    try:
        app(list(words), prog_name="tercel")
    except SystemExit as end:
        if end.code:
            raise typer.Exit(end.code if isinstance(end.code, int) else 1) from None


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
    from tercel.reproduce.claims import judge

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
    from tercel.reproduce.claims import judge
    from tercel.reproduce.results import write_claims

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
    from tercel.reproduce.claims import STATISTICS

    table = Table(title="rules, fixed before the run: reproduced if the whole 95 % interval lies there, not reproduced "
                  "if wholly elsewhere, else undecided")  # fmt: skip
    for heading in ("experiment", "claim", "paper", "reproduced if"):
        table.add_column(heading)
    for claim in ALL_CLAIMS:
        if claim.experiment in names:
            table.add_row(
                claim.experiment, claim.text, claim.paper, f"{STATISTICS[claim.statistic]} {claim.rule}"
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
        table.add_row(each.claim.text, each.claim.paper, with_interval(each.interval), each.rule, verdict)
    return table
