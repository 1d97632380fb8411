"""The heads of an experiment: those that a manifest names, and those that are trained for it, by the same budget.

Training is that of `tercel train`, as commands that anybody could type; what was trained with the very same settings is
not trained again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tercel.decode.proposers import KINDS
from tercel.errors import TercelError
from tercel.files import write_json, write_text
from tercel.measure.available import entry_of, lacking
from tercel.measure.manifest import Entry
from tercel.reading import read_json
from tercel.reproduce.scales import RECIPES, Recipe, Scale, method_of, recipe_of
from tercel.train.config import EAGLE3, METHODS

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
        own = self.own_head and name == EAGLE3
        reason = lacking(self.entry(name), has_head=own, has_model=self.has_model)
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
        return self.folder / "heads" / recipe.replace("/", "-")

    def command(self, recipe: str) -> list[str]:
        """The line that trains it; its settings stand in a file beside."""
        config = self._file(recipe, "yaml")
        data = [word for file in self._data(recipe) for word in ("--data", file)]
        out = str(self.head_folder(recipe))
        return ["train", self.target, *data, "--config", str(config), "--out", out, *self.more]

    def plan(self, recipe: str, run: RunCommand) -> None:
        """Tell what training it would take. Raises what the command raises."""
        self._write_settings(recipe)
        run([*self.command(recipe), "--plan"])

    def train(self, recipe: str, run: RunCommand) -> None:
        """Train it, or go on. Raises what the command raises."""
        self._write_settings(recipe)
        run(self.command(recipe))
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

    def _write_settings(self, recipe: str) -> None:
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
        return self.folder / "recipes" / f"{recipe.replace('/', '-')}.{ending}"


def first_rows(file: Path, part: int) -> str:
    """The first 1/part of the rows of a JSONL file. Raises `TercelError` for data that are no file, of which no part
    can be taken."""
    if not file.is_file():
        raise TercelError(f"{file} is no file; parts of the data can only be taken of JSONL files")
    rows = [line for line in file.read_text("utf-8").splitlines(keepends=True) if line.strip()]
    return "".join(rows[: max(1, len(rows) // part)])
