"""A tiny saved target, conversations it has answered, a head trained on them: all made by the CLI itself."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cli.running import run
from tests.tiny import save_tiny

TEXT = "the cat sat on a red mat and it is in the rain while he was there for ten days"
RECIPE_FILE = Path(__file__).with_name("recipe.yaml")
RECIPE = ["--batch-tokens", "256", "--draft-vocab", "64", "--lr", "5e-3", "--dtype", "float32"]
RECIPE += ["--config", str(RECIPE_FILE)]


@dataclass(frozen=True)
class World:
    """`head` was trained for `target` on `answers`, the target's own answers to `prompts`."""

    target: str
    prompts: Path
    answers: Path
    head: str
    log: str

    def copy_head(self, folder: Path) -> Path:
        return Path(shutil.copytree(self.head, folder / "copy"))


def recipe_with(folder: Path, *lines: str) -> Path:
    """A file of `RECIPE`'s settings and of these; a line wins over one before it."""
    file = folder / "recipe.yaml"
    file.write_text(RECIPE_FILE.read_text("utf-8") + "".join(f"{line}\n" for line in lines), encoding="utf-8")
    return file


def write_prompts(path: Path, count: int) -> Path:
    words, lines = TEXT.split(), []
    for number in range(count):
        picked = [words[(number * 7 + i * (1 + number % 5)) % len(words)] for i in range(4)]
        lines.append(json.dumps({"id": f"q{number}", "turns": [" ".join(picked)]}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("world")
    target = str(save_tiny(folder, "llama"))
    prompts, answers = write_prompts(folder / "prompts.jsonl", 20), folder / "answers.jsonl"
    asked = ["data", "regenerate", str(prompts), "--target", target, "--out", str(answers)]
    assert run(*asked, "--max-new-tokens", "16", "--dtype", "float32").code == 0
    head = str(folder / "head")
    trained = run("train", target, "--data", str(answers), "--out", head, *RECIPE)
    assert trained.code == 0, trained.err
    return World(target, prompts, answers, head, trained.out)
