"""Heads that travel: one of another maker through every verb, how it was read, and results that stay with a head."""

from __future__ import annotations

import json
from pathlib import Path

from .conftest import RECIPE, World, recipe_with
from .running import refused, run

EXACT = ["--dtype", "float32"]


def test_a_head_of_another_maker_goes_through_every_verb(tmp_path: Path, world: World) -> None:
    foreign = world.copy_head(tmp_path)
    (foreign / "tercel.json").unlink()  # what is left is the public format
    told = run("inspect", str(foreign))
    assert told.code == 0, told.err
    assert "format: sglang" in told.out
    placed = run("inspect", str(foreign), "--target", world.target, *EXACT, "--json", str(tmp_path / "i.json"))
    assert placed.code == 0, placed.err
    assert json.loads((tmp_path / "i.json").read_text("utf-8"))["head"]["feature_layers"] == [2, 4, 5]
    asked = ["generate", world.target, "--prompt", "the cat", "--max-new-tokens", "12", *EXACT]
    with_it, alone = run(*asked[:2], str(foreign), *asked[2:]), run(*asked, "--draft", "none")
    assert with_it.code == 0, with_it.err
    assert with_it.out == alone.out
    on = ["--data", str(world.answers), "--out", str(tmp_path / "more"), "--start-from", str(foreign)]
    told = recipe_with(tmp_path, "data-licence: CC0")
    more = run("train", world.target, *on, *RECIPE, "--epochs", "1", "--max-steps", "2", "--config", str(told))
    assert more.code == 0, more.err
    assert "Licence of the data: CC0." in (tmp_path / "more" / "README.md").read_text("utf-8")


def test_inspect_measures_how_a_head_was_read(tmp_path: Path, world: World) -> None:
    refused(run("inspect", world.head, "--probe"), "--target")
    asked = ["--target", world.target, "--probe", "--tasks", f"{world.prompts}:6", *EXACT]
    told = run("inspect", world.head, *asked, "--json", str(tmp_path / "p.json"))
    assert told.code == 0, told.err
    probe = json.loads((tmp_path / "p.json").read_text("utf-8"))["probe"]
    assert len(probe["rows"]) >= 3
    assert probe["verdict"] in " ".join(told.out.split())


def test_bench_keeps_its_result_with_the_head(tmp_path: Path, world: World) -> None:
    head = world.copy_head(tmp_path)
    asked = ["bench", world.target, str(head), "--tasks", f"{world.prompts}:3", "--max-new-tokens", "12", *EXACT]
    done = run(*asked, "--record", "--methods", "vanilla,eagle3", "--tree", "chain:4")
    assert done.code == 0, done.err
    (entry,) = json.loads((head / "tercel.json").read_text("utf-8"))["measured"]["decoding"]
    assert entry["shape"] == "a chain of 4"
    assert "Decoding: a chain of 4" in (head / "README.md").read_text("utf-8")
    refused(run(*asked, "--record", "--methods", "vanilla"), "--record needs eagle3")
