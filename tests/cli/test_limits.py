"""Texts without an end, numbers that would fill the machine, keys of a megabyte: refused in one sentence."""

from __future__ import annotations

import json
import os
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from tercel import limits
from tercel.errors import TercelError
from tercel.reading import read_json

from .conftest import World
from .running import everything, refused, run


def test_texts_without_an_end(tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """As devices are, whose size is not told; here it is a pipe with more in it than may be read."""

    def filled(name: str) -> str:
        pipe = tmp_path / name
        os.mkfifo(pipe)
        threading.Thread(target=pour, args=[pipe], daemon=True).start()  # nobody may ever read it
        return str(pipe)

    def pour(pipe: Path) -> None:
        with suppress(BrokenPipeError):
            pipe.write_bytes(b"the cat " * (1 << 17))

    monkeypatch.setattr(limits, "PROMPT_BYTES", 1 << 10)
    monkeypatch.setattr(limits, "SETTINGS_BYTES", 1 << 10)
    monkeypatch.setattr(limits, "JSON_BYTES", 1 << 10)
    much = "has more than 0.000977 MiB"
    asked = ("generate", world.target, world.head)
    refused(run(*asked, "--prompt-file", filled("prompt")), "cannot read the prompt from", "prompt", much)
    refused(run(*asked, stdin=" " * 2000), "cannot read the prompt from standard input", much)
    data = ("--data", str(world.answers), "--out", str(tmp_path / "head"))
    refused(run("train", world.target, *data, "--config", filled("recipe.yaml")), "cannot read", "recipe.yaml", much)
    with pytest.raises(TercelError, match=f"cannot be read as JSON .it {much}"):
        read_json(Path(filled("config.json")))


@pytest.mark.parametrize(
    "command",
    [
        "generate TARGET HEAD --tree N",
        "generate TARGET HEAD --tree chain:N",
        "generate TARGET HEAD --tree 2x2xN",
        "bench TARGET HEAD --repeats N",
        "bench TARGET HEAD --n-alpha N",
        "verify TARGET HEAD --samples N",
        "verify TARGET HEAD --slots N",
        "data regenerate PROMPTS --target TARGET --out OUT --in-flight N",
        "export HEAD --to vllm --out OUT --depth N",
        "serve-command HEAD --engine sglang --nodes N",
        "serve-command HEAD --engine sglang --top-k N",
        "serve-command HEAD --engine vllm --depth N",
    ],
)
def test_numbers_that_would_fill_the_machine(tmp_path: Path, world: World, command: str) -> None:
    *before, option, value = command.split()
    names = {"TARGET": world.target, "HEAD": world.head, "PROMPTS": str(world.prompts), "OUT": str(tmp_path / "out")}
    refused(run(*(names.get(word, word) for word in before), option, value.replace("N", str(10**12))), option)
    assert not everything(tmp_path)


def test_a_key_of_a_megabyte_is_no_sentence_of_a_megabyte(tmp_path: Path, world: World) -> None:
    data = tmp_path / "chats.jsonl"
    data.write_text(json.dumps({"k" * (1 << 20): 1}) + "\n", encoding="utf-8")
    line = refused(run("data", "show", str(data), "--target", world.target), "chats.jsonl", "kkk […] kkk")
    assert len(line) < 2000
