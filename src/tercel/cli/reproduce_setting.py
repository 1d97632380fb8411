"""What an experiment is done with, from a command line: sizes, data, tasks, the tiny model, heads that are trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tercel.cli.consoles import say
from tercel.cli.entrants import open_heads
from tercel.cli.models import open_draft_model, open_target
from tercel.cli.options import DecodingModelOptions, DraftOptions, Dtype
from tercel.cli.paths import tercel_command
from tercel.errors import NoRoomError

if TYPE_CHECKING:
    from tercel.reproduce.heads import Workshop
    from tercel.reproduce.scales import Scale
    from tercel.reproduce.world import World


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
        self.train_heads(recipes)

    def train_heads(self, recipes: Sequence[str]) -> None:
        """Those heads, one after the other."""
        for recipe in recipes:
            self.workshop.train(recipe, run_here, self._kept_features(recipe))

    def _kept_features(self, recipe: str) -> Path | None:
        """The folder of features for a head, made if they are not there; None where none are kept, as on a disk that
        has no room for them. Raises what else goes wrong."""
        if not self.workshop.keeps_features(recipe):
            return None
        self.workshop.write_settings(recipe)
        try:
            run_here(self.workshop.features_command(recipe))
        except NoRoomError:
            say("note: the disk has no room for features, so this head asks the target itself")
            return None
        return self.workshop.features_folder(recipe)

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
            "training": dict(scale.recipe) if self.workshop.data else {},  # heads that are given had their own
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
    """A command of this program, as if it were typed. Raises what it raises, and its exit, if that is not 0."""
    from tercel.cli.app import run_within

    say(f"$ {tercel_command(*words)}")
    run_within(words)
