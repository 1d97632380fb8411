"""Text that is not ours is shown: no terminal obeys it, nor is it read as rich's markup."""

from __future__ import annotations

import ast
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import tercel
from tercel.plain import encodable, one_line, visible
from tercel.target_model.model import Target

from .conftest import RECIPE, World
from .running import Ended, refused, run
from .screens import EVIL, EVIL_NAME, OBEYED, OWN, harmless, run_on_terminal

EXACT = ["--dtype", "float32"]
EVIL_TOKEN = 97  # "~" in the tokenizers of the tests


def evil_target(folder: Path, world: World) -> str:
    """The target of the tests under an evil name, one of its tokens an evil text."""
    copy = Path(shutil.copytree(world.target, folder / EVIL_NAME))
    file = copy / "tokenizer.json"
    tokenizer = json.loads(file.read_text("utf-8"))
    letters = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = {byte: 256 + place for place, byte in enumerate(sorted(set(range(256)) - set(letters)))}
    token = "".join(chr(others.get(byte, byte)) for byte in EVIL.encode())  # as a byte-level vocabulary spells it
    vocab = tokenizer["model"]["vocab"]
    assert vocab.pop("~") == EVIL_TOKEN
    vocab[token] = EVIL_TOKEN
    file.write_text(json.dumps(tokenizer), encoding="utf-8")
    return str(copy)


def evil_head(folder: Path, world: World) -> Path:
    head = Path(shutil.copytree(world.head, folder / f"head{EVIL_NAME}"))
    file = head / "tercel.json"
    info = json.loads(file.read_text("utf-8"))
    info["target"]["name"] = EVIL
    info["training"]["data"] = [EVIL]
    info["training"]["recipe"][EVIL] = EVIL
    file.write_text(json.dumps(info), encoding="utf-8")
    return head


def evil_data(folder: Path) -> str:
    said = [{"role": "user", "content": f"{EVIL} the cat"}, {"role": "assistant", "content": "sat ~"}]
    rows = [{"id": EVIL, "messages": said}, {"id": f"{EVIL}2", "messages": said[:1]}, {"id": "q", "turns": [EVIL]}]
    path = folder / f"data{EVIL_NAME}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


# -------------------------------------------------------------------------------------------------- every verb


def data_show(folder: Path, world: World) -> Ended:
    data = evil_data(folder)
    return run("data", "show", data, "--target", evil_target(folder, world), "--check-overlap", data)


def data_show_samples(folder: Path, world: World) -> Ended:
    return run("data", "show", evil_data(folder), "--target", evil_target(folder, world))


def data_clean(folder: Path, world: World) -> Ended:
    data = evil_data(folder)
    return run("data", "clean", str(world.answers), "--against", data, "--out", str(folder / EVIL_NAME))


def regenerate(folder: Path, world: World) -> Ended:
    asked = ["data", "regenerate", evil_data(folder), "--target", evil_target(folder, world), "--max-new-tokens", "2"]
    return run(*asked, "--out", str(folder / f"{EVIL_NAME}.out"), *EXACT)


def train(folder: Path, world: World) -> Ended:
    data = shutil.copy(world.answers, folder / EVIL_NAME)
    more = ["--max-steps", "1", "--out", str(folder / f"out{EVIL_NAME}")]
    return run("train", world.target, "--data", str(data), *RECIPE, *more)


def inspect(folder: Path, world: World) -> Ended:
    return run("inspect", str(evil_head(folder, world)))


def inspect_tensor(folder: Path, world: World) -> Ended:
    head = evil_head(folder, world)
    tensors = load_file(head / "model.safetensors")
    tensors[EVIL] = tensors["fc.weight"].clone()
    save_file(tensors, head / "model.safetensors")
    return run("inspect", str(head))


def generate_refused(folder: Path, world: World) -> Ended:
    return run("generate", evil_target(folder, world), str(evil_head(folder, world)), "--prompt", "x", *EXACT)


def doctor(folder: Path, world: World) -> Ended:
    return run("doctor", evil_target(folder, world), str(evil_head(folder, world)))


def export(folder: Path, world: World) -> Ended:
    target = Path(shutil.copytree(world.target, folder / EVIL_NAME))
    head, out = str(evil_head(folder, world)), str(folder / f"out{EVIL_NAME}")
    return run("export", head, "--to", "vllm", "--target", str(target), "--out", out)


def serve_command(folder: Path, world: World) -> Ended:
    return run("serve-command", str(evil_head(folder, world)), "--engine", "vllm")


def bench(folder: Path, world: World) -> Ended:
    tasks = shutil.copy(world.prompts, folder / f"{EVIL_NAME}.jsonl")
    long = json.dumps({"id": EVIL, "turns": ["cat " * 300]})
    Path(tasks).write_text("\n".join([*world.prompts.read_text("utf-8").splitlines()[:2], long]), encoding="utf-8")
    target = Path(shutil.copytree(world.target, folder / EVIL_NAME))
    head = world.copy_head(folder)
    asked = ["--tasks", str(tasks), "--max-new-tokens", "3", "--methods", "vanilla,eagle3", *EXACT]
    return run("bench", str(target), str(head), *asked)


def verify(folder: Path, world: World) -> Ended:
    return run("verify", world.target, world.head, "--tasks", EVIL)


def chat(folder: Path, world: World) -> Ended:
    return run("chat", world.target, world.head, *EXACT, stdin="/" + EVIL.replace("\r", "") + "\n")


def demo(folder: Path, world: World) -> Ended:
    return run("demo", world.target, str(folder / EVIL_NAME))


def push(folder: Path, world: World) -> Ended:
    return run("push", world.head, EVIL)


def template(folder: Path, world: World) -> Ended:
    target = Path(shutil.copytree(world.target, folder / "target"))
    raises = "{{ raise_exception(messages[0]['content']) }}"
    (target / "chat_template.jinja").write_text(raises, encoding="utf-8")
    return run("generate", str(target), world.head, "--prompt", EVIL, *EXACT)


def not_json(folder: Path, world: World) -> Ended:
    head = world.copy_head(folder)
    (head / "tercel.json").write_text(EVIL, encoding="utf-8")
    return run("inspect", str(head), "--json", str(folder / EVIL_NAME / EVIL_NAME))


VERBS: list[Callable[[Path, World], Ended]] = [
    data_show, data_show_samples, data_clean, regenerate, train, inspect, inspect_tensor, generate_refused, doctor,
    export, serve_command, bench, verify, chat, demo, push, template,
]  # fmt: skip


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.__name__)
def test_no_verb_sends_foreign_controls(
    tmp_path: Path, world: World, verb: Callable[[Path, World], Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    ended = verb(tmp_path, world)
    harmless(ended)
    assert "[b]" in " ".join((ended.out + ended.err).split())  # shown, not read as markup


def test_a_damaged_file_is_not_quoted_with_its_controls(tmp_path: Path, world: World) -> None:
    harmless(not_json(tmp_path, world), shows="tercel.json")


@pytest.mark.parametrize(
    "wrong",
    [
        [EVIL],
        ["generate", f"--{EVIL}"],
        ["generate", "t", "h", "--draft", EVIL],
        ["generate", "t", "h", "--logit-bias", EVIL],
        ["generate", "t", "h", "-p", "x", "--device", EVIL],
        ["generate", "t", "h", "x", EVIL],
        ["train", "t", "--data", "d", "--out", "o", "--config", EVIL],
        ["bench", "t", "h", "--methods", EVIL],
        ["inspect", EVIL],
        ["inspect", f"~{EVIL}"],
    ],
    ids=lambda wrong: " ".join(wrong[:1] + wrong[-2:-1]).replace(EVIL, "evil"),
)
def test_no_error_sends_what_was_typed(wrong: list[str]) -> None:
    ended = run(*wrong)
    assert ended.code == 2
    harmless(ended)


def test_no_error_sends_what_a_settings_file_says(tmp_path: Path, world: World) -> None:
    settings = tmp_path / "recipe.yaml"
    settings.write_text(json.dumps({EVIL: 1}), encoding="utf-8")
    ended = run("train", world.target, "--data", "d", "--out", "o", "--config", str(settings))
    refused(ended, "there is no setting")
    harmless(ended)


def test_no_unexpected_error_sends_its_message(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_args: object, **_more: object) -> None:
        raise ValueError(EVIL)

    monkeypatch.setattr(Target, "load", broken)
    ended = run_on_terminal("generate", world.target, world.head, "--prompt", "x")
    assert ended.code == 1
    harmless(ended)


# ------------------------------------------------------------------------------------------------ a model's words


@pytest.mark.parametrize("show", [[], ["--show"]], ids=["plain", "coloured"])
def test_a_model_cannot_command_a_terminal(tmp_path: Path, world: World, show: list[str]) -> None:
    target = evil_target(tmp_path, world)
    says = ["--draft", "none", "--logit-bias", f"{EVIL_TOKEN}=1000", "--max-new-tokens", "3", *EXACT, *show]
    harmless(run_on_terminal("generate", target, "--prompt", "x", *says), shows=visible(EVIL) * 3)
    harmless(run_on_terminal("chat", target, *says, typed="the cat\n"), shows=visible(EVIL) * 3)
    # a program gets what was said
    assert EVIL * 3 + "\n" in run("generate", target, "--prompt", "x", *says).out
    assert EVIL * 3 + "\n" in run("chat", target, *says, stdin="the cat\n").out


def test_accepted_drafts_are_painted(world: World) -> None:
    asked = ["generate", world.target, world.head, "--prompt", "the cat sat on", "--max-new-tokens", "16", *EXACT]
    painted = run_on_terminal(*asked, "--show").out
    words = run(*asked).out
    assert "\x1b[32m" in painted.split("own\n")[1]  # below the legend
    assert words in OWN.sub("", painted)
    assert words in run_on_terminal(*asked).out  # without --show, as they are


def test_a_bar_and_a_table_on_a_terminal(tmp_path: Path, world: World) -> None:
    tasks = shutil.copy(world.prompts, tmp_path / f"{EVIL_NAME}.jsonl")
    asked = ["verify", world.target, world.head, "--tasks", f"{tasks}:2", "--check", "greedy", *EXACT]
    ended = run_on_terminal(*asked, "--max-new-tokens", "4")
    harmless(ended, shows="greedy text")
    assert "━" in ended.out
    assert "\x1b[?25l" in ended.out  # the bar hides the cursor
    assert "\x1b[1;32mlossless" in ended.out
    asked = ["bench", world.target, world.head, "--tasks", f"{tasks}:1", "--methods", "vanilla", "--max-new-tokens"]
    harmless(run_on_terminal(*asked, "2", *EXACT, columns=160), shows="owned")


# ------------------------------------------------------------------------------------------------------ the gate


def test_controls_have_a_visible_form() -> None:
    assert visible("\x1b[1mé\t\n\r\x7f\x9b\u202e\udc80\uffff日本") == "␛[1mé\t\n␍␡\\x9b\\u202e\\udc80\\uffff日本"
    assert one_line("a\tb\nc") == "a␉b␊c"
    every = "".join(map(chr, range(0x2100))) + "\ud800\udfff"
    assert not OBEYED.search(visible(every))
    assert visible(visible(every)) == visible(every)


def test_what_an_encoding_lacks_is_spelled() -> None:
    assert encodable("τ 2.1 × 3 → 0-α … ✓ é 日", "ascii") == "tau 2.1 x 3 -> 0-alpha ... ok ? ?"
    assert encodable("τ é ×", "cp1252") == "tau é ×"
    assert encodable(visible("\x1b\x7f"), "ascii") == "^[^?"
    assert encodable("τ é 日", "utf-8") == "τ é 日"


def test_there_is_no_way_round_the_gate() -> None:
    """Whatever is printed is printed by the consoles of `cli/consoles.py`."""
    found = []
    for file in Path(tercel.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                past = called in {"print", "Console", "Text.from_markup", "Text.from_ansi"}
                if past or called.endswith((".echo", ".secho", "stdout.write", "stderr.write")):
                    found.append(f"{file.name}: {called}")
    assert found == []
