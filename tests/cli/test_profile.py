"""`tercel profile` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .conftest import World
from .running import everything, refused, run

EXACT = ["--dtype", "float32"]
SMALL = ["--quick", "--widths", "1,4", "--max-new-tokens", "6", *EXACT]


def test_target_and_head(tmp_path: Path, world: World) -> None:
    out, picture = tmp_path / "profile.json", tmp_path / "profile.svg"
    files = ["--json", str(out), "--plot", str(picture)]
    tasks = ["--tasks", f"{world.prompts}:2", "--contexts", "16,64"]
    ended = run("profile", world.target, world.head, *SMALL, *tasks, *files)
    assert ended.code == 0, ended.err
    value = json.loads(out.read_text("utf-8"))
    assert set(value["forward_ms"]) == set(value["floor_ms"]) == {"1", "4"}
    assert all(floor > 0 for floor in value["floor_ms"].values())
    assert set(value["step_share"]) == {"target", "head", "tree", "verify", "cache", "host"}
    assert sum(value["step_share"].values()) == pytest.approx(1)
    assert (value["head"], set(value["by_context"])) == (world.head, {"16", "64"})
    shown = " ".join(ended.out.split())
    for words in ("target forward", "level 2", "GB/s", value["verdict"]):
        assert words in shown
    assert picture.read_text("utf-8").lstrip().startswith("<?xml")


def test_a_target_without_a_head(world: World) -> None:
    """Standard output is for the JSON alone."""
    ended = run("profile", world.target, *SMALL, "--tasks", f"{world.prompts}:1", "--json", "-")
    assert ended.code == 0, ended.err
    value = json.loads(ended.out)
    assert (value["head"], value["method"], value["head_levels"]["ms"]) == (None, "vanilla", {})
    assert "no head is given and none is shipped" in ended.err
    assert "contexts of 256 tokens are left out" in ended.err
    assert value["verdict"] in " ".join(ended.err.split())


def test_what_is_wrong_is_said_in_one_sentence(tmp_path: Path, world: World) -> None:
    asked = ["profile", world.target, world.head, *EXACT]
    for more, words in (
        (["--contexts", "250"], ("context of 250 tokens", "takes 256", "shorter")),
        (["--contexts", "x"], ("--contexts 'x'", "such as 64,1024")),
        (["--widths", "0"], ("a block has 1 to 1,024 tokens, not 0",)),
        (["--widths", ","], ("no block to measure",)),
        (["--plot", str(tmp_path / "a.txt")], (".png or .svg",)),
        (["--tasks", "nothing"], ("there is no task nothing",)),
        (["--draft", "eagel3"], ("did you mean eagle3?",)),
    ):
        refused(run(*asked, *more), *words)
    refused(run("profile", world.target, str(tmp_path / "none"), *EXACT), "there is no head")
    refused(run("profile", world.head, *EXACT), "draft head")
    assert everything(tmp_path) == {}
