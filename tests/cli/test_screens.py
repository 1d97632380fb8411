"""Results are safe before they are shown; screens of every kind are served, or let go quietly."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tercel.cli.consoles import PlainConsole
from tercel.cli.train_progress import TrainProgress
from tercel.draft.history import HeldOut

from .conftest import RECIPE, World, recipe_with
from .running import everything, refused, run, run_program
from .screens import run_encoded, run_on_terminal, run_unread, run_with

EXACT = ["--dtype", "float32"]


def reporting(world: World) -> dict[str, list[str]]:
    """Every verb that writes a JSON file and prints what is in it."""
    few = ["--tasks", f"{world.prompts}:1"]
    return {
        "bench": ["bench", world.target, world.head, *few, "--methods", "vanilla,eagle3", "--max-new-tokens", "3"],
        "verify": ["verify", world.target, world.head, *few, "--check", "greedy", "--max-new-tokens", "3"],
        "inspect": ["inspect", world.head],
        "doctor": ["doctor", world.target, world.head],
        "serve-command": ["serve-command", world.head, "--engine", "sglang", "--target", "owner/name"],
        "data show": ["data", "show", str(world.answers), "--target", world.target],
        "generate": ["generate", world.target, world.head, "--prompt", "the cat", "--max-new-tokens", "3", *EXACT],
    }


VERBS = ["bench", "verify", "inspect", "doctor", "serve-command", "data show", "generate"]


# --------------------------------------------------------------------------------------------- files before screens


@pytest.mark.parametrize("verb", VERBS)
def test_a_reader_that_has_gone_costs_no_file(tmp_path: Path, world: World, verb: str) -> None:
    out = tmp_path / "report.json"
    ended = run_unread(*reporting(world)[verb], "--json", str(out))
    assert (ended.code, ended.err) == (141, "")
    if verb != "generate":  # whose answer is shown while it grows, and which ends with its reader
        assert json.loads(out.read_text("utf-8"))


def test_files_that_cannot_be_written_cost_no_result(tmp_path: Path, world: World) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    for verb in ("bench", "verify", "inspect", "doctor"):
        ended = run(*reporting(world)[verb], "--json", str(tmp_path / "file" / "report.json"))
        refused(ended, "report.json")
        assert "│" in ended.out


def test_what_a_benchmark_will_need_is_asked_before_it(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tercel.measure.report as report

    asked = [*reporting(world)["bench"], "--plot", str(tmp_path / "b.png"), "--json", str(tmp_path / "b.json")]
    monkeypatch.setattr(report, "find_spec", lambda name: None)
    refused(run(*asked), "matplotlib")
    assert everything(tmp_path) == {}


def test_a_run_outlives_the_reader_of_its_output(tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "head"
    command = ["train", world.target, "--data", str(world.answers), "--out", str(out), *RECIPE]
    command += ["--config", str(recipe_with(tmp_path, "eval-every: 2"))]
    reader, writer = os.pipe()
    evaluated = TrainProgress.evaluated

    def gone(self: TrainProgress, step: int, held_out: HeldOut) -> None:
        os.close(reader)
        evaluated(self, step, held_out)

    with monkeypatch.context() as patch, open(writer, "w", encoding="utf-8") as stdout, io.StringIO() as stderr:
        patch.setattr(TrainProgress, "evaluated", gone)
        assert run_with(stdout, stderr, command) == 130
        assert "the same command resumes it" in stderr.getvalue()
    again = run(*command)
    assert again.code == 0, again.err
    assert "resuming after step 2 of" in again.out


@pytest.mark.parametrize("arguments", [["--version"], ["train", "--help"], ["inspect"]], ids=" ".join)
def test_a_program_whose_reader_has_gone(world: World, arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    program = [sys.executable, "-c", "from tercel.cli.app import main; main()", *arguments]
    done = subprocess.run(
        [*program, world.head] if arguments == ["inspect"] else program, stdout=writer, stderr=subprocess.PIPE
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


# ------------------------------------------------------------------------------------------------ other encodings


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
@pytest.mark.parametrize("verb", VERBS)
def test_other_encodings(tmp_path: Path, world: World, verb: str, encoding: str) -> None:
    out = tmp_path / "report.json"
    ended = run_encoded(encoding, *reporting(world)[verb], "--json", str(out))
    assert ended.code == 0, ended.err
    assert json.loads(out.read_text("utf-8"))
    if verb == "bench":
        assert " tau " in ended.out
        assert "n-alpha" not in ended.out


def test_a_character_that_an_encoding_lacks(tmp_path: Path, world: World) -> None:
    refused(run_encoded("ascii", "inspect", "küken-τ"), "there is no head k?ken-tau")
    refused(run_encoded("ascii", "inspect", f"{tmp_path}/日\x1b"), "/?^[")
    assert "tau" in run_encoded("ascii", "train", "--help").out + run_encoded("ascii", "chat", "--help").out


def test_another_encoding_as_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    ended = run_program("chat", "--help")
    assert (ended.code, ended.err) == (0, "")
    assert "print rate and tau" in " ".join(ended.out.split())


# ------------------------------------------------------------------------------------------------ a model's own text


def token(world: World, text: str) -> int:
    return int(json.loads((Path(world.target) / "tokenizer.json").read_text("utf-8"))["model"]["vocab"][text])


@pytest.mark.parametrize(("letter", "text"), [("ĉ", "\t"), ("Ġ", " "), ("Ċ", "\n"), ("A", "A")])
def test_an_answer_is_not_laid_out(world: World, letter: str, text: str) -> None:
    says = ["--logit-bias", f"{token(world, letter)}=1000", "--max-new-tokens", "50", "--draft", "none", *EXACT]
    asked = ["generate", world.target, "--prompt", "the cat", *says]
    assert run(*asked).out == text * 50 + "\n"
    assert text * 50 + "\n" in run_on_terminal(*asked, "--show", columns=30).out


def test_samples_are_not_laid_out(tmp_path: Path, world: World) -> None:
    data = tmp_path / "data.jsonl"
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "if x:\n\ty  \n" + "a" * 300}]
    data.write_text(json.dumps({"messages": said}), encoding="utf-8")
    asked = ["data", "show", str(data), "--target", world.target]
    assert "if x:\n\ty  \n" + "a" * 300 in run(*asked).out
    assert "if x:\n\ty  \n" + "a" * 300 in run_on_terminal(*asked, columns=40).out


def test_the_same_words_are_the_same_tokens(tmp_path: Path, world: World) -> None:
    words = "the cat\n\tsat"
    asked = ["generate", world.target, world.head, "--max-new-tokens", "2", *EXACT]

    def tokens(*more: str, stdin: str | None = None) -> int:
        assert run(*asked, *more, "--json", str(tmp_path / "o.json"), stdin=stdin).code == 0
        return int(json.loads((tmp_path / "o.json").read_text("utf-8"))["prompt_tokens"])

    expected = tokens("--prompt", words)
    assert tokens("--prompt", words + "\n") == expected + 1  # what is typed is taken as it is
    file = tmp_path / "prompt.txt"
    for text in (words, f"{words}\n", f"\ufeff{words}\n", words.replace("\n", "\r\n") + "\r\n"):
        file.write_bytes(text.encode())
        assert tokens("--prompt-file", str(file)) == expected, repr(text)
        assert tokens(stdin=text) == expected, repr(text)
    assert tokens(stdin=f"{words}\n\n") == expected + 1  # one line end, no more
    assert tokens("--raw", stdin=f"{words}\n") == tokens("--raw", "--prompt", words)


def test_a_prompt_that_is_no_text(tmp_path: Path, world: World) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"caf\xe9")
    asked = ["generate", world.target, world.head, *EXACT]
    refused(run(*asked, "--prompt-file", str(file)), str(file), "not UTF-8")
    refused(run(*asked, stdin=b"caf\xe9"), "standard input", "not UTF-8")
    refused(run(*asked, "--prompt", "caf\udce9"), "--prompt", "not UTF-8")
    ended = run("chat", world.target, world.head, "--max-new-tokens", "2", *EXACT, stdin=b"/caf\xe9\nthe cat \xe9\n")
    assert ended.code == 0
    assert "there is no command /caf\ufffd" in ended.out


# ---------------------------------------------------------------------------------------------------- --json -


@pytest.mark.parametrize("verb", VERBS)
def test_with_the_json_on_standard_output_the_rest_is_on_standard_error(
    tmp_path: Path, world: World, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    usual = run(*reporting(world)[verb])
    ended = run(*reporting(world)[verb], "--json", "-")
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)
    assert len(ended.err.splitlines()) == len((usual.out + usual.err).splitlines())


def test_a_table_is_straight_whatever_it_holds(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.table import Table

    table = Table("name", "count")
    table.add_row("a\x1bb\x9bc [bold]d", "1")
    table.add_row("[/red]x :smile:", "2")
    PlainConsole().print(table)
    lines = capsys.readouterr().out.splitlines()
    assert len(set(map(len, lines))) == 1
    assert "a␛b\\x9bc [bold]d" in lines[3]
    assert "[/red]x :smile:" in lines[4]
