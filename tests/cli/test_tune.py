"""`tercel tune` as a user runs it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from tercel.interop.engines import ENGINES

from .conftest import World
from .running import Ended, everything, refused, run

EXACT = ["--dtype", "float32"]
QUICK = ["--minutes", "0.001", "--candidates", "chain:1,chain:2,2x2x4", "--max-new-tokens", "4", *EXACT]


def messages(world: World, path: Path, count: int) -> str:
    """The first prompts as conversations of messages."""
    lines = world.prompts.read_text("utf-8").splitlines()[:count]
    asked = [{"messages": [{"role": "user", "content": json.loads(line)["turns"][0]}]} for line in lines]
    path.write_text("".join(json.dumps(row) + "\n" for row in asked), encoding="utf-8")
    return str(path)


def shown(ended: Ended) -> str:
    return " ".join(ended.out.split())


def last_command(ended: Ended) -> list[str]:
    return shlex.split(ended.out.strip().splitlines()[-1])


def test_the_best_setting_here(tmp_path: Path, world: World) -> None:
    data = messages(world, tmp_path / "my.jsonl", 3)
    out, picture = tmp_path / "tune.json", tmp_path / "tune.svg"
    files = ["--json", str(out), "--plot", str(picture)]
    ended = run("tune", world.target, world.head, "--data", data, *QUICK, *files)
    assert ended.code == 0, ended.err
    value = json.loads(out.read_text("utf-8"))
    assert (value["engine"], value["head"], value["prompts"], value["slots"]) == ("tercel", world.head, 3, 1)
    assert set(value["settings"]) <= {"vanilla", "auto", "chain:1", "chain:2", "2x2x4"}
    assert {"vanilla", "auto", "chain:1"} <= set(value["settings"])
    for setting in value["settings"].values():
        assert setting["tokens_per_s"] > 0
        assert setting["speedup"] > 0
    assert value["settings"]["vanilla"]["speedup"] == 1
    assert set(value["last_round"]) == {"vanilla", "auto", value["choice"]}
    assert value["rounds"][-1]["asked"] >= 3
    assert (value["backend"], value["same_bits"]) == ("torch", True)
    assert len(value["over_vanilla_ci95"]) == 2
    assert value["use"] in value["settings"]
    assert value["verdict"] in shown(ended)
    assert value["command"] == ended.out.strip().splitlines()[-1]
    assert value["flags"] in value["command"]
    assert picture.read_text("utf-8").lstrip().startswith("<?xml")


def test_the_command_that_is_printed_is_one(tmp_path: Path, world: World) -> None:
    """With all that was asked for: it answers as was measured."""
    data = messages(world, tmp_path / "my.jsonl", 4)
    asked = ["tune", world.target, world.head, "--data", data, *QUICK, "--temperature", "0.7"]
    alone = last_command(run(*asked))
    assert alone[:3] == ["tercel", "chat", world.target]
    assert {"--dtype", "float32", "--temperature", "0.7"} <= set(alone)
    ended = run(*alone[1:], stdin="the cat\n")
    assert ended.code == 0, ended.err

    together = last_command(run(*asked, "--slots", "2"))
    assert together[:4] == ["tercel", "data", "regenerate", data]
    assert together[together.index("--in-flight") + 1] == "2"
    together[together.index("answers.jsonl")] = str(tmp_path / "answers.jsonl")
    ended = run(*together[1:], "--max-new-tokens", "4")
    assert ended.code == 0, ended.err
    assert "4 answered" in ended.out


@pytest.mark.parametrize("engine", ENGINES)
def test_what_an_engine_should_draft(tmp_path: Path, world: World, engine: str) -> None:
    data, out = messages(world, tmp_path / "my.jsonl", 3), tmp_path / "tune.json"
    asked = ["tune", world.target, world.head, "--data", data, "--engine", engine, "--max-new-tokens", "8", *EXACT]
    ended = run(*asked, "--longest", "3", "--json", str(out))
    assert ended.code == 0, ended.err
    value = json.loads(out.read_text("utf-8"))
    chains = [row for row in value["settings"] if row["top_k"] == 1]
    assert [row["speculative_tokens"] for row in chains] == [1, 2, 3]
    assert [row["nodes"] for row in chains] == [2, 3, 4]
    assert 1 <= chains[0]["tau"] <= chains[1]["tau"] <= chains[2]["tau"] <= 4
    assert all(row["break_even"] == row["tau"] and row["speedup"] is None for row in value["settings"])
    assert (len(value["settings"]) > 3) == ENGINES[engine].drafts_trees
    assert len(value["acceptance"]) == 3
    assert value["verdict"] in shown(ended)
    assert "pays" in value["verdict"]
    exported, launched = value["commands"]
    assert exported.startswith("tercel export ")
    assert launched in ended.out
    words = shlex.split(exported)
    assert words[words.index("--depth") + 1] == str(value["use"]["depth"])
    if not ENGINES[engine].takes_gguf:  # this target has no such file
        words[words.index("--out") + 1] = str(tmp_path / "exported")
        done = run(*words[1:])
        assert done.code == 0, done.err


def test_costs_of_an_engine_settle_it(tmp_path: Path, world: World) -> None:
    data, costs = messages(world, tmp_path / "my.jsonl", 3), tmp_path / "costs.json"
    asked = ["tune", world.target, world.head, "--data", data, "--engine", "vllm", "--max-new-tokens", "8", *EXACT]
    asked += ["--cost-json", str(costs), "--json", str(tmp_path / "tune.json")]
    costs.write_text(json.dumps({"forward_ms": {"1": 10, "2": 40, "9": 80}, "draft_ms": 1}), encoding="utf-8")
    ended = run(*asked, "--plot", str(tmp_path / "a.png"))
    assert ended.code == 0, ended.err
    value = json.loads((tmp_path / "tune.json").read_text("utf-8"))
    first = value["settings"][0]
    assert first["speedup"] == pytest.approx(first["tau"] * 10 / 41)
    assert value["use"] is None
    assert "do not speculate in vLLM" in shown(ended)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")

    for wrong in ({}, {"forward_ms": {"2": 3}}, {"forward_ms": {"1": "x"}}, {"1": -3}, {"forward_ms": 3}):
        costs.write_text(json.dumps(wrong), encoding="utf-8")
        refused(run(*asked), "costs.json", "forward_ms")


def test_what_is_wrong_is_said_in_one_sentence(tmp_path: Path, world: World) -> None:
    data = messages(world, tmp_path / "my.jsonl", 2)
    empty, long = tmp_path / "empty.jsonl", tmp_path / "long.jsonl"
    empty.write_text("", encoding="utf-8")
    long.write_text(json.dumps({"turns": ["cat " * 300]}) + "\n", encoding="utf-8")
    before = everything(tmp_path)
    asked = ["tune", world.target, world.head, *EXACT]
    for more, words in (
        (["--data", str(empty)], ("empty.jsonl", "no question")),
        (["--data", str(long)], ("fills the context", "256")),
        (["--data", str(long), "--engine", "vllm"], ("no prompt leaves room",)),
        (["--data", data, "--max-new-tokens", "256", "--engine", "vllm"], ("no prompt leaves room",)),
        (["--data", str(tmp_path / "none.jsonl")], ("there is no task file",)),
        (["--data", data, "--engine", "vlm"], ("vlm",)),
        (["--data", data, "--candidates", "chain:x"], ("--candidates 'chain:x'", "chain:LENGTH")),
        (["--data", data, "--candidates", "auto"], ("nothing beside auto",)),
        (["--data", data, "--cost-json", str(empty)], ("--cost-json is for another --engine",)),
        (["--data", data, "--engine", "vllm", "--minutes", "3"], ("--minutes is for --engine tercel",)),
        (["--data", data, "--engine", "vllm", "--cost-json", str(empty)], ("empty.jsonl", "JSON")),
        (["--data", data, "--plot", str(tmp_path / "a.txt")], (".png or .svg",)),
        (["--data", data, "--minutes", "100000"], ("1440",)),
    ):
        refused(run(*asked, *more), *words)
    refused(run("tune", world.target, str(tmp_path / "none"), "--data", data, *EXACT), "there is no head")
    refused(run("tune", world.target, world.head), "--data")
    assert everything(tmp_path) == before
