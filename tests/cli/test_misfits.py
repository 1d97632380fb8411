"""Does this head fit this target? Every verb that puts the two together says the same, in the same sentence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tercel.draft.misfits import Misfit, misfits
from tercel.interop.formats.read import read_head
from tercel.target_model.model import Target
from tercel.target_model.stored import StoredTarget
from tests.cli.conftest import RECIPE, World, recipe_with
from tests.cli.running import Ended, everything, refused, run
from tests.interop.foreign import write_specforge
from tests.tiny import VOCAB, save_tiny, tiny_tokenizer

EXACT = ["--dtype", "float32"]
SHORT = ["--max-new-tokens", "4", *EXACT]


def short(out: Path) -> Path:
    """Settings of a run of few steps."""
    return recipe_with(out, "limit: 8")


def other_tokenizer(folder: Path, world: World) -> Path:
    other = Path(shutil.copytree(world.target, folder / "other"))
    tiny_tokenizer(last_merge="o l").save_pretrained(other)
    return other


# what is wrong → a target for which it is
TARGETS: dict[str, Callable[[Path, World], Path]] = {
    "width": lambda folder, world: save_tiny(folder, "llama", hidden_size=48),
    "vocabulary": lambda folder, world: save_tiny(folder, "llama", vocab_size=VOCAB + 32),
    "depth": lambda folder, world: save_tiny(folder, "llama", num_hidden_layers=9),
    "feature layers": lambda folder, world: save_tiny(folder, "llama", num_hidden_layers=4),
    "tokenizer": other_tokenizer,
    "weights": lambda folder, world: save_tiny(folder, "llama", seed=7),
}
WORDS = {
    "width": ("sizes", "takes features of width 32, but {} has width 48; give a head made for {}"),
    "vocabulary": ("sizes", "is for a vocabulary of 128 tokens, but {} has 160; give"),
    "depth": ("sizes", "is for a target of 8 layers, but {} has 9; give"),
    "feature layers": ("feature layers", "reads the input of layer 4, but {} has layers 0..3; give"),
    "tokenizer": ("tokenizer", "but {} has another one, so that its drafts would be other tokens; give"),
    "weights": ("weights", "whose weights or settings are not those of {}; acceptance may be poor, so give"),
}
DECODING = ("generate", "chat", "bench", "verify")
# by verb: what follows it for a target, a head, and a folder to write into
VERBS: dict[str, Callable[[str, str, Path, World], list[str]]] = {
    "generate": lambda target, head, out, world: [target, head, "--prompt", "the cat", *SHORT],
    "chat": lambda target, head, out, world: [target, head, *SHORT],
    "bench": lambda target, head, out, world: [target, head, "--tasks", "demo:1", *SHORT],
    "verify": lambda target, head, out, world: [target, head, "--tasks", "demo:1", *SHORT],
    "doctor": lambda target, head, out, world: [target, head, "--json", str(out / "report.json")],
    "inspect": lambda target, head, out, world: [head, "--target", target, *EXACT],
    "export": lambda target, head, out, world: [head, "--to", "vllm", "--target", target, "--out", str(out / "vllm")],
    "serve-command": lambda target, head, out, world: [head, "--engine", "vllm", "--target", target],
    "train": lambda target, head, out, world: [
        *[target, "--start-from", head, "--data", str(world.answers), "--out", str(out / "run")],
        *[*RECIPE, "--config", str(short(out))],
    ],
}


def beside(kind: str, folder: Path, world: World) -> tuple[str, str, Misfit]:
    """A target, a head, and the first thing that the two have not in common."""
    target = str(TARGETS[kind](folder, world))
    head = world.head
    if kind == "feature layers":  # a head that says how deep its target is says that first
        head = str(write_specforge(read_head(Path(head)), folder / "foreign"))
    loaded = Target.load(target)
    return target, head, misfits(read_head(Path(head), num_layers=loaded.num_layers), loaded)[0]


@pytest.fixture(params=TARGETS)
def pair(request: pytest.FixtureRequest, tmp_path: Path, world: World) -> tuple[str, str, Misfit]:
    what, words = WORDS[request.param]
    target, head, found = beside(request.param, tmp_path, world)
    assert found.what == what
    assert words.format(target, target) in str(found)
    assert str(found).startswith(head)
    return target, head, found


def test_every_verb_gives_the_same_answer(pair: tuple[str, str, Misfit], tmp_path: Path, world: World) -> None:
    target, head, found = pair
    out = tmp_path / "out"
    out.mkdir()
    for verb, arguments in VERBS.items():
        ended = run(verb, *arguments(target, head, out, world), stdin="/exit\n")
        if verb == "doctor":
            told_by_doctor(ended, out / "report.json", found)
        elif found.severity == "refuse" or verb in DECODING:
            assert str(found) in refused(ended), verb
            assert {Path(file).name for file in everything(out)} <= {"report.json", "recipe.yaml"}, verb
        else:
            assert ended.code == 0, (verb, ended.err)
            assert f"warning: {found}" in " ".join(f"{ended.out} {ended.err}".split()), verb


def told_by_doctor(ended: Ended, report: Path, found: Misfit) -> None:
    level = {"refuse": "problem", "warn": "warning"}[found.severity]
    assert ended.code == (1 if level == "problem" else 0)
    told = [f for f in json.loads(report.read_text("utf-8"))["findings"] if f["check"] == found.what]
    assert [f"{f['level']}: {f['found']}; {f['advice']}" for f in told] == [f"{level}: {found}"]


def test_other_weights_are_taken_if_asked_for(tmp_path: Path, world: World) -> None:
    target, head, found = beside("weights", tmp_path, world)
    asked = VERBS["generate"](target, head, tmp_path, world)
    assert refused(run("generate", *asked)).endswith(f"{found}; --force-head uses it anyway")
    assert run("generate", *asked, "--force-head").code == 0


@pytest.mark.parametrize("kind", ["width", "tokenizer"])
def test_nothing_else_is(kind: str, tmp_path: Path, world: World) -> None:
    target, head, found = beside(kind, tmp_path, world)
    ended = run("generate", *VERBS["generate"](target, head, tmp_path, world), "--force-head")
    assert refused(ended).endswith(str(found))


def test_what_fits_is_not_remarked_on(tmp_path: Path, world: World) -> None:
    (tmp_path / "out").mkdir()
    for verb in ("inspect", "export", "serve-command", "train"):
        ended = run(verb, *VERBS[verb](world.target, world.head, tmp_path / "out", world))
        assert (ended.code, "was trained for" in ended.out + ended.err) == (0, False), verb


@pytest.mark.parametrize("kind", TARGETS)
def test_a_target_is_known_alike_loaded_or_not(kind: str, tmp_path: Path, world: World) -> None:
    target, head, found = beside(kind, tmp_path, world)
    stored = StoredTarget.find(target, ask_hub=False)
    assert misfits(read_head(Path(head), num_layers=stored.num_layers), stored)[0] == found
    own = StoredTarget.find(world.target, ask_hub=False)
    assert misfits(read_head(Path(world.head)), own) == ()


def test_of_a_target_on_the_hub_only_what_is_here_is_compared(world: World) -> None:
    unknown = StoredTarget.find("somebody/some-target", ask_hub=False)
    assert (unknown.num_layers, unknown.hidden_size, unknown.vocab_size) == (None, None, None)
    assert (unknown.tokenizer_or_none, unknown.embeddings(), unknown.address) == (None, None, "somebody/some-target")
    assert misfits(read_head(Path(world.head)), unknown) == ()
