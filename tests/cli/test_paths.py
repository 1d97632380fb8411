"""Paths as they are typed: homes, spaces, names that are too long, places that may not be read."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from tercel.cli import data
from tercel.cli.app import app
from tercel.cli.groups import with_groups
from tercel.cli.paths import tercel_command, user_name, user_names, user_path
from tercel.cli.train import next_commands
from tercel.errors import TercelError
from tercel.interop.card import head_card
from tercel.interop.formats.read import read_head
from tercel.target_model.model import Target

from .conftest import RECIPE, World, recipe_with
from .running import everything, refused, run

EXACT = ["--dtype", "float32"]
LONG = "n" * 300


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of one's own, and another folder to work in."""
    folder, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.chdir(elsewhere)
    return folder


# ----------------------------------------------------------------------------------------------------------- homes


def parameters() -> Iterator[tuple[str, object]]:
    """Every parameter of every verb with its annotation."""
    for command in (*app.registered_commands, *data.app.registered_commands):
        assert command.callback is not None
        hints = get_type_hints(with_groups(command.callback), include_extras=True)
        yield from ((f"{command.name} {name}", hint) for name, hint in hints.items() if name != "return")


def test_every_path_is_read_by_the_same_parser() -> None:
    found = []
    for name, hint in parameters():
        kind, *more = get_args(hint)
        if "Path" in str(kind):
            (option,) = more
            assert option.parser is user_path, name
            found.append(name)
    assert len(found) > 20


def test_homes(home: Path) -> None:
    assert user_path("~/a b") == home / "a b"
    assert user_path("~") == home
    assert user_path("./~/a") == Path("./~/a")
    assert user_path(Path("a")) == Path("a")
    assert user_name("~/a,b") == f"{home}/a,b"
    assert user_name("owner/name") == "owner/name"
    assert user_names("demo:3,~/a.jsonl:2") == f"demo:3,{home}/a.jsonl:2"
    with pytest.raises(TercelError, match="~nobody-of-that-name"):
        user_path("~nobody-of-that-name/x")
    with pytest.raises(TercelError, match="NUL"):
        user_path("a\0b")
    refused(run("inspect", "~nobody-of-that-name/x"), "no home is known", "~nobody-of-that-name/x")


def test_homes_in_flags(home: Path, world: World) -> None:
    shutil.copytree(world.target, home / "target")
    shutil.copytree(world.head, home / "head")
    shutil.copy(world.prompts, home / "tasks.jsonl")
    shutil.copy(world.answers, home / "answers.jsonl")
    (home / "prompt.txt").write_text("the cat", encoding="utf-8")
    (home / "none.jsonl").write_text('{"id": 1, "turns": ["other words"]}\n', encoding="utf-8")
    more = ["--max-new-tokens=2", *EXACT]
    wrote = {
        "1.json": ["generate", "~/target", "~/head", "--prompt-file=~/prompt.txt", *more],
        "2.json": ["bench", "~/target", "~/head", "--tasks=~/tasks.jsonl:1", "--methods=vanilla", *more],
        "3.json": ["bench", "~/target", "~/head", "--data-dir=~", "--tasks=tasks:1", "--methods=vanilla", *more],
        "4.json": ["inspect", "~/head", "--target=~/target"],
        "5.json": ["data", "show", "~/answers.jsonl", "--target=~/target", "--check-overlap=~/none.jsonl"],
    }
    for name, asked in wrote.items():
        ended = run(*asked, f"--json=~/out/{name}")
        assert ended.code == 0, ended.err
    assert {path.name for path in (home / "out").iterdir()} == set(wrote)
    assert everything(Path.cwd()) == {}


def test_homes_in_yaml(home: Path, world: World) -> None:
    shutil.copy(world.answers, home / "answers.jsonl")
    values = ["data: [~/answers.jsonl]", "out: ~/head", "features: ~/features", "start-from: ~/earlier"]
    recipe_with(home, *values)
    shutil.copytree(world.head, home / "earlier")
    made = run("features", world.target, "--data=~/answers.jsonl", "--out=~/features", "--dtype", "float32")
    assert made.code == 0, made.err
    ended = run("train", world.target, *RECIPE, "--config=~/recipe.yaml", "--max-steps", "1")
    assert ended.code == 0, ended.err
    assert (home / "head" / "model.safetensors").is_file()
    assert everything(Path.cwd()) == {}
    (home / "recipe.yaml").write_text("out: ~nobody-of-that-name/x", encoding="utf-8")
    refused(run("train", world.target, "--config=~/recipe.yaml", "--data", "d"), "no home is known")
    (home / "recipe.yaml").write_text('out: "a\\0b"', encoding="utf-8")
    refused(run("train", world.target, "--config=~/recipe.yaml", "--data", "d"), "NUL")


# ------------------------------------------------------------------------------------------------------ commands


def test_printed_commands_are_commands(tmp_path: Path, world: World) -> None:
    assert shlex.split(tercel_command("x", "a b", "$(c)", "d'e")) == ["tercel", "x", "a b", "$(c)", "d'e"]
    target, head = "my models/llama", "a head; rm x"
    for line in next_commands(target, head):
        assert shlex.split(line)[2:4] == [target, head]
    model = read_head(Path(world.head))
    assert model.info.target is not None
    named = replace(model, info=replace(model.info, target=replace(model.info.target, name=target)))
    assert f"tercel bench {shlex.quote(target)} .\n" in head_card(named)
    assert f"--target {shlex.quote(target)}\n" in head_card(named)
    spaced = Path(shutil.copytree(world.head, tmp_path / "my head"))
    ended = run("serve-command", str(spaced), "--engine", "trtllm", "--target", "owner/name")
    assert f"`tercel export '{spaced}' --to trtllm --out DIR`" in ended.err
    ended = run("serve-command", str(spaced), "--engine", "vllm", "--target", world.target)
    assert str(spaced) in shlex.split(ended.out)[-1]


# ------------------------------------------------------------------------------------- what the system refuses


@pytest.mark.parametrize(
    "asked",
    [
        ["inspect", LONG],
        ["generate", LONG, "-p", "x"],
        ["generate", "smollm2-135m", "h", "--prompt-file", LONG],
        ["train", "t", "--data", "d", "--out", "o", "--config", LONG],
        ["data", "show", LONG, "--target", "no/such/target"],
        ["data", "clean", LONG, "--against", "x", "--out", "o"],
        ["data", "regenerate", LONG, "--target", "t", "--out", "o"],
        ["data", "regenerate", "x", "--target", "t", "--out", LONG],
        ["serve-command", LONG, "--engine", "vllm"],
        ["export", LONG, "--to", "vllm", "--out", "o"],
        ["push", LONG, "a/b"],
        ["bench", "t", "h", "--tasks", LONG],
    ],
    ids=lambda asked: " ".join(word for word in asked if word != LONG),
)
def test_names_that_are_too_long(asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    refused(run(*asked))
    assert everything(tmp_path) == {}


def test_long_names_beside_right_ones(tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    refused(run("train", world.target, "--data", LONG, "--out", "o"), LONG)
    refused(run("train", world.target, "--data", str(world.answers), "--out", LONG, *RECIPE), LONG)
    refused(run("generate", world.target, LONG, "-p", "x"), LONG)
    refused(run("inspect", world.head, "--json", LONG), LONG)
    refused(run("verify", world.target, world.head, "--data-dir", LONG, "--tasks", "mt_bench"), LONG)
    assert everything(tmp_path) == {}


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (PermissionError(13, "Permission denied", "/a/secret"), ("/a/secret: Permission denied", "permissions")),
        (OSError(36, "File name too long", "/a/b"), ("/a/b: File name too long", "shorter")),
        (IsADirectoryError(21, "Is a directory", b"/a/b"), ("/a/b: Is a directory", "check the path")),
        (OSError(40, "Too many levels of symbolic links", Path("/a")), ("/a: Too many levels", "check the path")),
        (OSError(28, "No space left on device"), ("writing failed: No space left", "free space")),
        (OSError(30, "Read-only file system", "/a"), ("/a: Read-only file system", "can be written")),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_the_system_says_of_a_path(
    world: World, monkeypatch: pytest.MonkeyPatch, error: OSError, words: tuple[str, ...]
) -> None:
    def failing(*_args: object, **_more: object) -> None:
        raise error

    monkeypatch.setattr(Target, "load", failing)
    refused(run("generate", world.target, world.head, "-p", "x"), *words)


def test_an_error_that_names_no_path_is_unexpected(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_args: object, **_more: object) -> None:
        raise OSError("the client's own")

    monkeypatch.setattr(Target, "load", failing)
    with pytest.raises(OSError, match="own"):
        run("generate", world.target, world.head, "-p", "x")
