"""File names with a byte that is not UTF-8: texts keep working, and where weights cannot be kept, it is said first."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from tercel.chat import read_conversations
from tercel.draft import load_head
from tercel.errors import TercelError
from tercel.files import as_json, as_json_line, cache_dir, write_json, write_text
from tercel.reading import parse_json, read_json
from tests.cli.conftest import RECIPE, World
from tests.cli.running import everything, refused, run

ODD = os.fsdecode(b"\xe9")  # how Python has such a byte
WRITTEN = "\\udce9"  # what is written instead


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    try:
        (tmp_path / ODD).mkdir()
    except OSError:  # as on macOS
        pytest.skip("the file system takes no such names")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def done(*arguments: str) -> str:
    ended = run(*arguments)
    assert (ended.code, ended.err) == (0, "")
    return ended.out


def rows(file: str) -> list[dict[str, object]]:
    return [parse_json(line) for line in Path(file).read_text("utf-8").splitlines()]


def test_data_and_results(here: Path, world: World) -> None:
    data, prompts = f"{ODD}/answers{ODD}.jsonl", f"{ODD}/prompts{ODD}.jsonl"
    shutil.copy(world.prompts, prompts)
    lines = [json.loads(line) for line in world.answers.read_text("utf-8").splitlines()]
    Path(data).write_text("".join(json.dumps({"messages": line["messages"]}) + "\n" for line in lines))
    Path("other.jsonl").write_text('{"id": "o", "turns": ["0123456789 0 1 2"]}\n')

    done("data", "show", data, "--target", world.target, "--json", f"shown{ODD}.json")
    done("data", "clean", data, "--against", "other.jsonl", "--out", f"clean{ODD}.jsonl")
    assert rows(f"clean{ODD}.jsonl")[0]["source"] == f"answers{WRITTEN}"
    asked = ["data", "regenerate", f"clean{ODD}.jsonl", "--target", world.target, "--max-new-tokens", "2"]
    done(*asked, "--out", f"again{ODD}.jsonl")
    assert len(rows(f"again{ODD}.jsonl")) == len(lines)

    out = done("train", world.target, "--data", data, "--out", "head", *RECIPE, "--max-steps", "1")
    assert "has done all of its 1 steps" in done(
        "train", world.target, "--data", data, "--out", "head", *RECIPE, "--max-steps", "1"
    ), out
    assert load_head(Path("head")).info.training.data == (f"answers{WRITTEN}.jsonl",)
    assert f"answers{WRITTEN}.jsonl" in Path("head/README.md").read_text("utf-8")
    bench = ["bench", world.target, "head", "--tasks", f"{prompts}:2", "--max-new-tokens", "2", "--repeats", "1"]
    done(*bench, "--json", f"bench{ODD}.json", "--record")
    assert f"prompts{WRITTEN}" in Path("head/README.md").read_text("utf-8")
    done("inspect", "head", "--json", f"{ODD}/inspected.json")
    for file in (f"shown{ODD}.json", f"bench{ODD}.json", f"{ODD}/inspected.json", f"again{ODD}.jsonl.settings.json"):
        assert read_json(Path(file))


def test_where_weights_cannot_be_kept_it_is_said_before_the_work(here: Path, world: World) -> None:
    shutil.copytree(world.target, f"target{ODD}")
    shutil.copytree(world.head, f"head{ODD}")
    before = everything(here)
    train = ["train", world.target, "--data", str(world.answers), *RECIPE]
    asked = [
        [*train, "--out", f"new{ODD}"],
        [*train, "--out", f"{ODD}/new"],
        ["features", world.target, "--data", str(world.answers), "--out", f"features{ODD}"],
        ["train", f"target{ODD}", "--data", str(world.answers), "--out", "new", *RECIPE],
        ["export", world.head, "--to", "vllm", "--target", world.target, "--out", f"export{ODD}"],
        ["inspect", f"head{ODD}"],
        ["bench", world.target, f"head{ODD}", "--tasks", "demo"],
    ]
    for arguments in asked:
        refused(run(*arguments), "has a byte outside UTF-8, and weights cannot be kept there; rename it")
    assert everything(here).keys() == before.keys()


def test_below_such_a_folder(here: Path, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the name as it is given is text."""
    monkeypatch.chdir(here / ODD)
    refused(run("train", world.target, "--data", str(world.answers), "--out", "new", *RECIPE), "outside UTF-8")
    assert everything(here) == {}
    shutil.copytree(world.head, "head")
    bench = ["bench", world.target, "head", "--tasks", "demo:2", "--max-new-tokens", "2", "--repeats", "1"]
    done(*bench, "--json", "bench.json", "--record")
    assert json.loads(Path("head/tercel.json").read_text("utf-8"))["measured"]["decoding"]
    monkeypatch.setenv("XDG_CACHE_HOME", str(here / ODD))
    with pytest.raises(TercelError, match="outside UTF-8"):
        cache_dir()


def test_what_is_written_can_be_read(here: Path) -> None:
    value = {f"a{ODD}": [f"{ODD} é 🙂", '\\"']}
    written = {f"a{WRITTEN}": [f"{WRITTEN} é 🙂", '\\"']}
    assert parse_json(as_json(value)) == parse_json(as_json_line(value)) == written
    write_json(here / f"x{ODD}.json", value)
    assert read_json(here / f"x{ODD}.json") == written
    write_text(here / "x.md", f"from {ODD}")
    assert (here / "x.md").read_text("utf-8") == f"from {WRITTEN}"


def test_conversations_are_named_after_their_file_in_text(here: Path) -> None:
    Path(f"{ODD}.jsonl").write_text('{"messages": [{"role": "user", "content": "x"}]}\n')
    (conversation,) = read_conversations(f"{ODD}.jsonl")
    assert (conversation.id, conversation.source) == (f"{WRITTEN}-1", WRITTEN)
