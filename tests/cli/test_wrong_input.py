"""Every wrong input ends with code 2, one sentence that names it, and nothing half-written."""

from __future__ import annotations

import json
import pickle
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tercel.cli import prompt_options
from tercel.errors import TercelError
from tercel.file_set import file_set
from tests.tiny import VOCAB

from .conftest import RECIPE, World
from .running import everything, refused, run

EXACT = ["--dtype", "float32"]


def change_json(file: Path, *keys: str, value: Any) -> None:
    whole = json.loads(file.read_text("utf-8"))
    place = whole
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    file.write_text(json.dumps(whole), encoding="utf-8")


def ask(target: str, head: str | Path, *more: str) -> Any:
    return run("generate", target, str(head), "--prompt", "the cat", "--max-new-tokens", "4", *EXACT, *more)


# ----------------------------------------------------------------- heads that do not belong to the target


def test_target_and_head_swapped(world: World) -> None:
    refused(ask(world.head, world.target), world.head, "draft head")


def test_head_that_is_not_there(tmp_path: Path, world: World) -> None:
    refused(ask(world.target, tmp_path / "no-head"), "there is no head", "no-head")
    refused(run("generate", world.target, "--prompt", "x"), "no head is shipped for")
    refused(run("inspect", "no-such-head"), "there is no head no-such-head")
    refused(run("inspect", "__pycache__"), "there is no head __pycache__")


# ------------------------------------------------------------------------------------- damaged checkpoints


def test_truncated_safetensors(tmp_path: Path, world: World) -> None:
    head = world.copy_head(tmp_path)
    weights = head / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    refused(ask(world.target, head), str(weights), "truncated")
    refused(run("inspect", str(head)), str(weights), "truncated")


def test_nan_in_the_head(tmp_path: Path, world: World) -> None:
    head = world.copy_head(tmp_path)
    tensors = load_file(head / "model.safetensors")
    tensors["fc.weight"][3, 5] = float("nan")
    save_file(tensors, head / "model.safetensors")
    refused(ask(world.target, head), "fc.weight", "NaN")


def test_an_answer_that_fails_where_it_is_made(tmp_path: Path, world: World) -> None:
    """In the loop it ends with an event of its own; who asked for it alone is told as of any wrong input."""
    other = Path(shutil.copytree(world.target, tmp_path / "other"))
    change_json(other / "generation_config.json", "suppress_tokens", value=list(range(VOCAB)))
    out = tmp_path / "numbers.json"
    ended = ask(str(other), world.head, "--json", str(out))
    *notes, error = ended.err.strip().splitlines()
    assert (ended.code, ended.out.strip()) == (2, "")
    assert all(note.startswith("note: ") for note in notes)  # which rules it follows
    assert "no token is left that could be generated token 0" in error
    assert not out.exists()


class Bomb:
    """Runs code when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


def test_pickled_checkpoint_is_not_opened(tmp_path: Path, world: World) -> None:
    head = world.copy_head(tmp_path)
    (head / "model.safetensors").unlink()
    marker = tmp_path / "code-was-run"
    (head / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(marker)))
    refused(ask(world.target, head), "pytorch_model.bin", "pickle")
    assert not marker.exists()


def test_pickled_training_state_is_not_run(tmp_path: Path, world: World) -> None:
    head = world.copy_head(tmp_path)
    marker = tmp_path / "code-was-run"
    torch.save({"key": Bomb(marker)}, head / "training" / "state.pt")
    again = ("train", world.target, "--data", str(world.answers), "--out", str(head), *RECIPE)
    refused(run(*again), "state.pt", "is missing or damaged", "--overwrite")
    with file_set(head / "training") as staging:  # one whose checksum is right
        torch.save({"key": Bomb(marker)}, staging / "state.pt")
    refused(run(*again), "state.pt", "cannot be read")
    assert not marker.exists()


def test_map_of_another_head(tmp_path: Path, world: World) -> None:
    head = world.copy_head(tmp_path)
    tensors = load_file(head / "model.safetensors")
    tensors["d2t"] = tensors["d2t"][:-1]
    save_file(tensors, head / "model.safetensors")
    refused(ask(world.target, head), "d2t has 63 rows", "64")


# --------------------------------------------------------------------------------------- training data


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", ("holds no conversations",)),
        ('{"messages": [{"role": "user", "content": "a"}]}\n{"messages": \n', ("line 2", "not JSON")),
        ('{"messages": [{"role": "user", "content": "a"}]}\n{"other": 1}\n', ("line 2",)),
    ],
    ids=["empty", "malformed", "unknown"],
)
def test_bad_training_data(tmp_path: Path, world: World, content: str, words: tuple[str, ...]) -> None:
    data, out = tmp_path / "data.jsonl", tmp_path / "head"
    data.write_text(content, encoding="utf-8")
    refused(run("train", world.target, "--data", str(data), "--out", str(out), *RECIPE), str(data), *words)
    assert not out.exists()
    answers = tmp_path / "answers.jsonl"
    ended = run("data", "regenerate", str(data), "--target", world.target, "--out", str(answers))
    refused(ended, str(data), *words)
    assert set(everything(tmp_path)) == {"data.jsonl"}


def test_training_into_a_folder_that_is_in_use(tmp_path: Path, world: World) -> None:
    (tmp_path / "thesis.txt").write_text("precious", encoding="utf-8")
    ended = run("train", world.target, "--data", str(world.answers), "--out", str(tmp_path), *RECIPE)
    refused(ended, str(tmp_path), "not empty")
    assert set(everything(tmp_path)) == {"thesis.txt"}


def test_training_that_is_not_the_same_run(tmp_path: Path, world: World) -> None:
    head = world.copy_head(tmp_path)
    before = everything(head)
    command = ["train", world.target, "--data", str(world.answers), "--out", str(head), *RECIPE]
    refused(run(*command, "--lr", "1e-3"), str(head), "other settings", "--overwrite")
    assert everything(head) == before


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("epoch: 2", ("'epoch'", "did you mean epochs?")),
        ("learning-rate: 2", ("'learning-rate'", "did you mean")),
        ("epochs: 2.5", ("epochs", "2.5")),
        ("epochs: true", ("epochs", "True")),
        ("[1, 2]", ("must be a map",)),
        ("a: b: c", ("is not YAML",)),
        ("seed: 2024-99-99", ("is not YAML", "month")),
        ("[" * 5000, ("is not YAML",)),
        ("seed: 0x" + "f" * 5000, ("seed", "cannot be written as text")),
        ("loss: hinge", ("loss must be one of soft, hard, lk",)),
        ("feature-layers: [1, x]", ("recipe.yaml: feature-layers", "1,x")),
        ("feature-layers: [1, 99]\neval-share: 0.2", ("feature layer 99", "out of range")),
    ],
)
def test_bad_yaml(tmp_path: Path, world: World, settings: str, words: tuple[str, ...]) -> None:
    file, out = tmp_path / "recipe.yaml", tmp_path / "head"
    file.write_text(settings, encoding="utf-8")
    command = ["train", world.target, "--data", str(world.answers), "--out", str(out), "--config", str(file)]
    refused(run(*command, *EXACT), *words)
    assert not out.exists()


# ------------------------------------------------------------------------------- prompts, tasks, values


def test_context_longer_than_the_target_allows(world: World) -> None:
    asked = ["generate", world.target, world.head, "--prompt", "cat " * 200, *EXACT]
    refused(run(*asked), "tokens", "256", "shorten it")


def test_context_longer_than_the_head_allows(tmp_path: Path, world: World) -> None:
    head = world.copy_head(tmp_path)
    change_json(head / "tercel.json", "head", "max_position_embeddings", value=64)
    ended = ask(world.target, head, "--max-new-tokens", "100")
    assert ended.out == ask(world.target, head, "--max-new-tokens", "100", "--draft", "none").out
    assert ended.err == "note: the draft head has 64 positions; the text beyond them has no drafts\n"
    assert ask(world.target, head).err == ""
    tasks = ["--tasks", f"{world.prompts}:2", "--max-new-tokens", "80", *EXACT]
    for verb in (["bench", "--methods", "vanilla,eagle3"], ["verify", "--check", "greedy"]):
        ended = run(verb[0], world.target, str(head), *verb[1:], *tasks)
        assert ended.code == 0
        assert ended.err.count("64 positions") == 1


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--top-p", "0"], ("top_p", "above 0")),
        (["--temperature", "-1"], ("temperature", "at least 0")),
        (["--logit-bias", "17"], ("'17'", "ID=VALUE")),
        (["--device", "gpu"], ("'gpu'", "device")),
        (["--prompt-file", "x"], ("both --prompt and --prompt-file",)),
        (["--system", "s", "--raw"], ("--system", "--raw")),
    ],
)
def test_bad_values(world: World, flags: list[str], words: tuple[str, ...]) -> None:
    refused(ask(world.target, world.head, *flags), *words)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_where_there_is_none(tmp_path: Path, world: World) -> None:
    refused(ask(world.target, world.head, "--device", "cuda"), "cuda", "0 CUDA devices")
    out = tmp_path / "head"
    command = ["train", world.target, "--data", str(world.answers), "--out", str(out), "--device", "cuda:1"]
    refused(run(*command, *RECIPE), "cuda:1")
    assert not out.exists()


def test_prompts(tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(run("generate", world.target, world.head, stdin=" \n"), "the prompt is empty")
    refused(run("generate", world.target, world.head, "--prompt-file", str(tmp_path / "no")), "cannot read")
    bare = Path(shutil.copytree(world.target, tmp_path / "bare"))
    (bare / "chat_template.jinja").unlink()
    refused(run("generate", str(bare), world.head, "--prompt", "x", *EXACT), "no chat template", "--raw")
    refused(run("chat", str(bare), world.head, *EXACT), "no chat template", "--raw")
    monkeypatch.setattr(sys, "stdin", type("Terminal", (), {"isatty": lambda self: True})())
    with pytest.raises(TercelError, match="there is no prompt"):
        prompt_options.read_prompt(None, None)


@pytest.mark.parametrize("verb", ["bench", "verify"])
def test_unknown_task(tmp_path: Path, world: World, verb: str) -> None:
    asked = [verb, world.target, world.head, "--json", str(tmp_path / "out.json"), "--tasks"]
    refused(run(*asked, "prompt", "--data-dir", str(world.prompts.parent)), "prompt", "did you mean prompts?")
    refused(run(*asked, "demo:1000"), "demo", "1000")
    assert not everything(tmp_path)


def test_unknown_method(world: World) -> None:
    refused(run("bench", world.target, world.head, "--methods", "vanilla,eagel3"), "did you mean eagle3?")
    refused(run("bench", world.target, world.head, "--methods", "eagle3"), "lacks vanilla")
    refused(run("verify", world.target, world.head, "--temperature", "0"), "--temperature")
    refused(run("bench", world.target, world.head, "--draft", "none"), "--draft none")


def test_usage_errors_end_with_2() -> None:
    for wrong, words in (
        (["generat"], ("Did you mean 'generate'?", "`tercel --help`")),
        (["generate"], ("missing argument", "TARGET", "`tercel generate --help`")),
        (["generate", "t", "--no-such-flag"], ("no such option", "--no-such-flag")),
        (["train", "t", "--epochs", "x"], ("--epochs", "integer")),
        (["export", "t", "--to", "x", "--out", "o"], ("--to", "'x'", "llamacpp")),
    ):
        refused(run(*wrong), *words)
    assert run().code == run("data").code == 2  # with the help on standard output
    assert "Usage" in run().out


def test_answers_that_exist_are_not_overwritten(world: World) -> None:
    before = world.answers.read_bytes()
    asked = ["data", "regenerate", str(world.prompts), "--target", world.target, "--out", str(world.answers)]
    refused(run(*asked), "exists already")
    assert world.answers.read_bytes() == before
