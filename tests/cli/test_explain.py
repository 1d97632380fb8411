"""`tercel explain`: the steps of an answer as text, as a page and as JSON; for every method, greedy and sampled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .conftest import World
from .running import Ended, refused, run
from .screens import run_encoded, run_on_terminal
from .test_foreign_text import EVIL_TOKEN, evil_target

EXACT = ["--dtype", "float32", "--backend", "torch"]
SAMPLED = ["--temperature", "0.9", "--top-p", "0.95"]


def asked(world: World, verb: str = "explain") -> list[str]:
    return [verb, world.target, world.head, "--prompt", "the cat sat", "--max-new-tokens", "12", *EXACT]


@pytest.mark.parametrize("how", [[], [*SAMPLED, "--seed", "4"]], ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", ["eagle3", "eagle3-sampled-chain", "pld", "suffix", "none"])
def test_every_method_is_explained(tmp_path: Path, world: World, method: str, how: list[str]) -> None:
    if method == "eagle3-sampled-chain" and not how:
        return  # drafts that are drawn are drawn with a temperature
    page, record = tmp_path / "page.html", tmp_path / "steps.json"
    draft = ["--draft", method, "--tree", "chain:2" if "chain" in method else "2x3x6", *how]
    done = run(*asked(world), *draft, "--html", str(page), "--json", str(record))
    assert done.code == 0, done.err
    told = json.loads(record.read_text("utf-8"))
    plain = run(*asked(world, "generate"), *draft, "--json", str(tmp_path / "plain.json"))
    assert plain.code == 0, plain.err
    answer = json.loads((tmp_path / "plain.json").read_text("utf-8"))
    for name in ("text", "tokens", "accepted", "tau", "finish_reason"):
        assert told[name] == answer[name]
    assert (told["method"], told["sampling"]["temperature"]) == (
        "vanilla" if method == "none" else method,
        0.9 if how else 0.0,
    )
    assert len(told["steps"]) == answer["steps"] + 1
    for number in range(1, len(told["steps"])):
        assert f"Step {number}: " in done.out
    assert f"{len(answer['tokens'])} tokens in {answer['steps']} steps" in done.out
    assert done.out.splitlines()[-1] == f"page  {page}"
    assert page.read_text("utf-8").count('<section class="step"') == len(told["steps"])
    assert ("It was drawn" in done.out) == bool(how)


def test_a_seed_is_told_so_that_the_same_can_be_seen_again(tmp_path: Path, world: World) -> None:
    records = []
    for seed in ([], ["--seed"]):
        given = [*seed, str(records[0]["sampling"]["seed"])] if seed else []
        record = tmp_path / "steps.json"
        assert run(*asked(world), *SAMPLED, "--tree", "2x2x4", *given, "--json", str(record)).code == 0
        records.append(json.loads(record.read_text("utf-8")))
    steps = [[{**step, "seconds": None} for step in record["steps"]] for record in records]
    assert steps[0] == steps[1]


def test_files_on_standard_output_leave_it_to_them(world: World) -> None:
    few = [*asked(world), "--tree", "2x2x4"]
    for flag, begins in (("--html", "<!doctype html>"), ("--json", "{")):
        done = run(*few, flag, "-")
        assert done.code == 0
        assert done.out.startswith(begins)
        assert "Step 1: " in done.err
    refused(run(*few, "--html", "-", "--json", "-"), "--html and --json", "one of them a file")


def test_foreign_text_stays_text(tmp_path: Path, world: World) -> None:
    page = tmp_path / "page.html"
    evil = ["--logit-bias", f"{EVIL_TOKEN}=100", "--max-new-tokens", "3", *EXACT, "--draft", "pld"]
    done = run_on_terminal("explain", evil_target(tmp_path, world), "--prompt", "the cat", *evil, "--html", str(page))
    assert done.code == 0
    assert "owned" in done.out
    assert "\x1b]0;" not in done.out
    assert not set("\x1b\x07\x9b\u202e") & set(page.read_text("utf-8"))
    ascii_only: Ended = run_encoded("ascii", *asked(world), "--tree", "2x2x4")
    assert ascii_only.code == 0
    assert "tau" in ascii_only.out
    assert "?" not in ascii_only.out
