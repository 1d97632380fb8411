"""What fails while a command works: a full disk, an interruption, a fault of our own."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from tercel.cli.app import main
from tercel.target_model.model import Target
from tests.full_disk import full_disk
from tests.tiny import save_tiny_gguf

from .conftest import RECIPE, World
from .running import everything, refused, run, run_program


@pytest.mark.parametrize("room", [300, 20_000, 100_000], ids=["nothing", "no state", "no second state"])
def test_full_disk_while_training(tmp_path: Path, world: World, room: int) -> None:
    out = tmp_path / "head"
    command = ["train", world.target, "--data", str(world.answers), "--out", str(out), *RECIPE]
    with full_disk(room):
        ended = run(*command)
    if room > 300:
        refused(ended, str(out), "disk")
    else:  # not even the tokenised conversations
        refused(ended, "cannot be kept", "free space")
    assert not [name for name in everything(tmp_path) if ".part" in name or name.endswith(".old")]
    # a state that is there is whole: the same command goes on from it, to the same head
    saved = (out / "training" / "state.pt").exists()
    again = run(*command, *([] if saved else ["--overwrite"]))
    assert again.code == 0, again.err
    assert (out / "model.safetensors").read_bytes() == (Path(world.head) / "model.safetensors").read_bytes()


@pytest.mark.parametrize("late", [False, True], ids=["weights", "tokenizer"])
def test_full_disk_while_a_gguf_file_is_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    def full(*_args: object, **_more: object) -> None:
        raise Exception("No space left on device (os error 28)")  # the very type that the tokenizers library raises

    save_tiny_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if late:
        monkeypatch.setattr(PreTrainedTokenizerFast, "save_pretrained", full)
    with full_disk(1 << 30 if late else 5000):
        ended = run("generate", str(tmp_path / "tiny.gguf"), "--draft", "none", "--prompt", "x")
    refused(ended, f"writing {tmp_path / 'cache'}", "os error", "free space")
    assert not [name for name in everything(tmp_path / "cache") if not name.endswith(".lock")]


def test_full_disk_while_reporting(tmp_path: Path, world: World) -> None:
    out = tmp_path / "head.json"
    out.write_text("an older report", encoding="utf-8")
    with full_disk(200):
        ended = run("inspect", world.head, "--json", str(out))
    refused(ended, str(out))
    assert everything(tmp_path) == {"head.json": b"an older report"}


def test_unexpected_errors(world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    def broken(*_args: object, **_more: object) -> None:
        raise ValueError("a\nfault")

    monkeypatch.setattr(Target, "load", broken)
    command = ["generate", world.target, world.head, "--prompt", "x"]
    with pytest.raises(SystemExit) as ended:
        main(command)
    assert ended.value.code == 1
    message = capsys.readouterr().err.strip()
    assert message == "unexpected error: ValueError: a fault; `tercel --debug …` shows where it happened"
    with pytest.raises(ValueError, match="fault"):
        main(["--debug", *command])


def test_interrupted(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_args: object, **_more: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Target, "load", interrupted)
    ended = run("generate", world.target, world.head, "--prompt", "x")
    assert (ended.code, ended.err) == (130, "interrupted\n")


def test_as_a_program(tmp_path: Path) -> None:
    refused(run_program("inspect", str(tmp_path / "nothing")), "there is no head")
