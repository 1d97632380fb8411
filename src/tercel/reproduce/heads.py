"""The heads of an experiment: those that a manifest names, and those that are trained for it, by the same budget.

Training is that of `tercel train`, as commands that anybody could type; what was trained with the very same settings is
not trained again. Heads that learn from the same layers share the target's features, which are made once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tercel.chat.lines import text_lines
from tercel.decode.proposers import KINDS, MTP
from tercel.errors import TercelError
from tercel.files import write_json, write_text
from tercel.measure.available import brings_modules, entry_of, lacking
from tercel.measure.manifest import Entry
from tercel.reading import read_json
from tercel.reproduce.scales import RECIPES, Recipe, Scale, method_of, recipe_of
from tercel.train.config import EAGLE3, FUSING, METHODS

Words = Sequence[str]
RunCommand = Callable[[Words], None]


@dataclass(frozen=True)
class Workshop:
    """Where heads are trained. target: as TARGET; layers: of it; data: files of its answers, none if nothing is to be
    trained; folder: for heads and recipes; more: options of the model for every command; own_head: one that is given or
    shipped, for EAGLE-3."""

    scale: Scale
    target: str
    layers: int
    data: Sequence[str]
    folder: Path
    manifest: Mapping[str, Entry]
    more: Words = ()
    own_head: bool = False
    has_model: bool = False

    def entry(self, name: str) -> Entry:
        """What `name` drafts with, whether or not its head is there yet."""
        if name in self.manifest:
            return self.manifest[name]
        recipe = recipe_of(name)
        if recipe is not None and recipe in self.manifest:
            head: str | None = self.manifest[recipe].head
        elif recipe is not None and self.trains(recipe):
            head = str(self.head_folder(recipe))
        else:
            head = entry_of(name, self.manifest).head
        return Entry(method_of(name), head)

    def trains(self, recipe: str) -> bool:
        """Whether the recipe's head is made here: unless the manifest names one, there is nothing to learn from, or
        this version has no such method."""
        if recipe in self.manifest or not self.data:
            return False
        return self.settings(recipe).get("method", EAGLE3) in METHODS

    def lacks(self, name: str) -> str | None:
        """Why `name` cannot be measured, as a clause."""
        own, modules = self.own_head and name == EAGLE3, name == MTP and brings_modules(self.target)
        reason = lacking(self.entry(name), has_head=own, has_model=self.has_model, has_modules=modules)
        if reason == "no head is given" and not self.data:
            return "no head is given with --heads, nor answers with --data to train one on"
        return reason

    def to_train(self, names: Sequence[str]) -> list[str]:
        """Recipes of these names whose head is not there yet."""
        recipes = dict.fromkeys(
            recipe
            for name in names
            if (recipe := recipe_of(name)) and name not in self.manifest and method_of(name) in KINDS
        )
        return [recipe for recipe in recipes if self.trains(recipe) and not self._made(recipe)]

    def head_folder(self, recipe: str) -> Path:
        """One for all that the head hangs on, so that other settings leave it alone."""
        return self.folder / "heads" / self._called(recipe)

    def keeps_features(self, recipe: str) -> bool:
        return self.scale.keeps_features and not RECIPES[recipe].begins_as_target

    def features_folder(self, recipe: str) -> Path:
        """Of what the recipe's head learns from; the same for all that learn from the same layers."""
        return self.folder / "features" / ("last" if self._reads_last(recipe) else "fused")

    def features_command(self, recipe: str) -> list[str]:
        """The line that makes them, or what is missing of them."""
        layers = ["--feature-layers", str(self.layers)] if self._reads_last(recipe) else []
        out = str(self.features_folder(recipe))
        return ["features", self.target, *self._data_words(recipe), "--out", out, *layers, *self.more]

    def command(self, recipe: str, features: Path | None = None) -> list[str]:
        """The line that trains it; its settings stand in a file beside. features: a folder of them, if there is one."""
        config = self._file(recipe, "yaml")
        kept = [] if features is None else ["--features", str(features)]
        words = ["train", self.target, *self._data_words(recipe), "--config", str(config)]
        return [*words, "--out", str(self.head_folder(recipe)), *kept, *self.more]

    def plan(self, recipe: str, run: RunCommand) -> None:
        """Tell what training it would take. Raises what the command raises."""
        self.write_settings(recipe)
        run([*self.command(recipe), "--plan"])

    def train(self, recipe: str, run: RunCommand, features: Path | None = None) -> None:
        """Train it, or go on. features: as in `command`. Raises what the command raises."""
        self.write_settings(recipe)
        run(self.command(recipe, features))
        write_json(self._file(recipe, "json"), self._done(recipe))

    def settings(self, recipe: str) -> dict[str, Any]:
        """Of `tercel train`, under its names."""
        wanted: Recipe = RECIPES[recipe]
        values = {**self.scale.recipe, **wanted.settings}
        if wanted.top_layer:
            values["feature_layers"] = [self.layers]
        return values

    def _data(self, recipe: str) -> Sequence[str]:
        """The files that it learns from; a part of the data has a file of its own."""
        part = RECIPES[recipe].part
        return self.data if part == 1 else (str(self.folder / "data" / f"1of{part}.jsonl"),)

    def _data_words(self, recipe: str) -> list[str]:
        return [word for file in self._data(recipe) for word in ("--data", file)]

    def _reads_last(self, recipe: str) -> bool:
        """Whether it learns from the last hidden state alone."""
        return RECIPES[recipe].top_layer or self.settings(recipe).get("method", EAGLE3) not in FUSING

    def write_settings(self, recipe: str) -> None:
        """The files that its commands name."""
        part = RECIPES[recipe].part
        if part > 1:
            write_text(Path(self._data(recipe)[0]), "".join(first_rows(Path(file), part) for file in self.data))
        write_text(self._file(recipe, "yaml"), yaml.safe_dump(self.settings(recipe), sort_keys=True))

    def _made(self, recipe: str) -> bool:
        file = self._file(recipe, "json")
        return file.is_file() and read_json(file) == self._done(recipe)

    def _done(self, recipe: str) -> dict[str, Any]:
        """What a head hangs on."""
        told = {"target": self.target, "data": list(self.data), "part": RECIPES[recipe].part}
        return {**told, "settings": self.settings(recipe)}

    def _file(self, recipe: str, ending: str) -> Path:
        return self.folder / "recipes" / f"{self._called(recipe)}.{ending}"

    def _called(self, recipe: str) -> str:
        digest = hashlib.sha256(json.dumps(self._done(recipe), sort_keys=True).encode()).hexdigest()
        return f"{recipe.replace('/', '-')}-{digest[:8]}"


def first_rows(file: Path, part: int) -> str:
    """The first 1/part of the rows of a JSONL file, plain or gzipped. Raises `TercelError` for data that are no file,
    of which no part can be taken, and for a file that cannot be read."""
    if not file.is_file():
        raise TercelError(f"{file} is no file; parts of the data can only be taken of JSONL files")
    rows = [f"{line}\n" for _, line in text_lines(file)]
    return "".join(rows[: max(1, len(rows) // part)])
