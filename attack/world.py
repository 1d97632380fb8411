"""The honest things that inputs are made from: a tiny model, heads in every format, conversations, a run that was
stopped. Made once by the package itself, in a child, so that the process that forks computes nothing."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from attack.forks import in_a_child

TEXT = "the cat sat on a red mat and it is in the rain while he was there for ten days"
PROMPT, LENGTH = "the cat sat on", 8
ASKED = ("the cat sat", "on a red mat")
ANSWER = 12  # tokens that servers are asked for
DEPTH = 3  # of the chains that servers draft
STOPPED = 4  # steps of the run that was stopped
EXACT = ("--dtype", "float32")
# fmt: off
RECIPE = (
    "--batch-tokens", "256", "--draft-vocab", "64", "--lr", "5e-3", "--epochs", "3", *EXACT,
    "--config", str(Path(__file__).with_name("recipe.yaml")),
)
# fmt: on
FORMATS = ("sglang", "specforge", "speculators", "modelopt", "angelslim")


@dataclass(frozen=True)
class World:
    """Where the honest things lie. `facts`: what right commands give, to compare with."""

    path: Path

    @property
    def target(self) -> Path:
        return self.path / "llama"

    @property
    def head(self) -> Path:
        """A head of this package, alone in its folder."""
        return self.path / "head"

    @property
    def gguf(self) -> Path:
        return self.path / "tiny.gguf"

    @property
    def prompts(self) -> Path:
        return self.path / "prompts.jsonl"

    @property
    def answers(self) -> Path:
        return self.path / "answers.jsonl"

    @property
    def asked(self) -> Path:
        """The questions that servers are asked."""
        return self.path / "asked.jsonl"

    @property
    def stopped(self) -> Path:
        """The output of a training run after `STOPPED` of its steps; `done` is that of the whole run."""
        return self.path / "stopped"

    @property
    def done(self) -> Path:
        return self.path / "done"

    @property
    def features(self) -> Path:
        """What the target gives for the data of that run; `featured` is the output of a run that read it there."""
        return self.path / "features"

    @property
    def featured(self) -> Path:
        return self.path / "featured"

    @property
    def begun(self) -> Path:
        """A folder with regenerated answers of which some are written (`out.jsonl.part`, its settings)."""
        return self.path / "begun"

    @property
    def recipe(self) -> Path:
        """What of the recipe of that run is no flag."""
        return self.path / "recipe.yaml"

    def foreign(self, format: str) -> Path:
        """A head of `FORMATS`, "eagle1", "pickled" or "sharded"."""
        return self.path / "foreign" / format

    @cached_property
    def facts(self) -> dict[str, Any]:
        return dict(json.loads((self.path / "facts.json").read_text("utf-8")))

    def training(self, out: str, *more: str) -> list[str]:
        """The command of the run at `stopped`, with another output."""
        told = ["train", str(self.target), "--data", str(self.answers), "--config", str(self.recipe)]
        return [*told, "--out", out, *RECIPE, *more]


def make_world(folder: Path) -> World:
    """Make everything in a child process. Raises `RuntimeError` if that fails."""
    failed = "the honest world could not be made; the package does not even do its usual work"
    in_a_child(lambda: _make(World(folder)), failed)
    return World(folder)


def _make(world: World) -> None:
    from tercel.draft import load_head
    from tests.interop import foreign
    from tests.tiny import save_tiny, save_tiny_gguf

    world.path.mkdir(parents=True, exist_ok=True)
    save_tiny(world.path, "llama")
    save_tiny_gguf(world.gguf)
    _write_prompts(world)
    world.recipe.write_text("save-every: 2\n", encoding="utf-8")
    _run(
        "data",
        "regenerate",
        str(world.prompts),
        "--target",
        str(world.target),
        "--out",
        str(world.answers),
        *EXACT,
        "--max-new-tokens",
        "16",
    )
    _run(*world.training(str(world.done)))
    made = ["features", str(world.target), "--data", str(world.answers), "--out", str(world.features)]
    _run(*made, "--dtype", "float32")
    _run(*world.training(str(world.featured), "--features", str(world.features)))
    for name in ("config.json", "model.safetensors", "tercel.json", "README.md"):
        world.head.mkdir(exist_ok=True)
        (world.head / name).write_bytes((world.done / name).read_bytes())
    _stop_a_run(world)
    _begin_answers(world)
    model = load_head(world.head)
    for name in FORMATS:
        foreign.WRITERS[name](model, world.foreign(name))
    foreign.write_eagle1(model, world.foreign("eagle1"))
    foreign.write_sglang(model, world.foreign("pickled"), pickled=True)
    _write_shards(world.foreign("sglang"), world.foreign("sharded"))
    facts = {"answer": _answer(world), "served": _served(world), "steps": _steps(world)}
    (world.path / "facts.json").write_text(json.dumps(facts), encoding="utf-8")


def _run(*arguments: str) -> str:
    from typer.testing import CliRunner

    from tercel.cli.app import app

    ended = CliRunner().invoke(app, arguments, catch_exceptions=False, env={"COLUMNS": "200"})
    if ended.exit_code != 0:
        raise RuntimeError(f"tercel {' '.join(arguments)}: {ended.stderr}")
    return ended.stdout


def _write_prompts(world: World) -> None:
    words, rows = TEXT.split(), []
    for number in range(16):
        text = " ".join(words[(number * 7 + i * (1 + number % 5)) % len(words)] for i in range(4))
        rows.append({"id": f"q{number}", "turns": [text]})
    world.prompts.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    rows = [{"id": f"a{number}", "turns": [text]} for number, text in enumerate(ASKED)]
    world.asked.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _stop_a_run(world: World) -> None:
    """The same run as at `done`, left after some steps."""
    from tercel.chat import load_chats
    from tercel.target_model.model import Target
    from tercel.train.config import TrainConfig
    from tercel.train.loop import train

    config = TrainConfig(
        batch_tokens=256, draft_vocab=64, eval_share=0.2, lr=5e-3, ttt_steps=2, eval_every=2, save_every=2, epochs=3
    )
    target = Target.load(str(world.target))
    chats, _ = load_chats([world.answers], target.tokenizer, max_length=config.max_length)
    train(target, chats, config, world.stopped, data_names=[world.answers.name], stop_after=STOPPED)


def _begin_answers(world: World) -> None:
    """As a kill leaves them: every answer but the last five, and half a line."""
    world.begun.mkdir()
    out = world.begun / "out.jsonl"
    _run(*regenerating(world, str(out)))
    lines = out.read_bytes().splitlines(keepends=True)
    (world.begun / "out.jsonl.part").write_bytes(b"".join(lines[:-5]) + lines[-5][:40])
    (world.begun / "whole.jsonl").write_bytes(b"".join(lines))
    out.unlink()


def regenerating(world: World, out: str, *more: str) -> list[str]:
    """The command whose interrupted output is at `begun`."""
    asked = ["data", "regenerate", str(world.prompts), "--target", str(world.target), "--out", out]
    return [*asked, "--max-new-tokens", "6", "--in-flight", "4", *EXACT, *more]


def _write_shards(whole: Path, folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder.mkdir(parents=True)
    (folder / "config.json").write_bytes((whole / "config.json").read_bytes())
    tensors, places = load_file(whole / "model.safetensors"), {}
    for number, names in enumerate((sorted(tensors)[::2], sorted(tensors)[1::2]), 1):
        shard = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in names}, folder / shard)
        places.update(dict.fromkeys(names, shard))
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def _answer(world: World) -> str:
    plain = ["--draft", "none", "--prompt", PROMPT, "--max-new-tokens", str(LENGTH), *EXACT]
    return _run("generate", str(world.target), *plain)


def _steps(world: World) -> int:
    rows = [json.loads(line) for line in (world.done / "training" / "metrics.jsonl").read_text("utf-8").splitlines()]
    return max(row["step"] for row in rows)


def _served(world: World) -> dict[str, Any]:
    """What an honest server answers to the questions: by prompt ids, tokens and accepted drafts of each step."""
    from tercel.decode.compat import load_draft
    from tercel.decode.engine import Engine
    from tercel.decode.proposers import EAGLE3, make_proposer
    from tercel.decode.sampling import SamplingParams
    from tercel.decode.types import Request
    from tercel.draft.shape import TreeShape
    from tercel.measure.tasks import first_prompts, parse_tasks
    from tercel.target_model.model import Target

    target = Target.load(str(world.target))
    head = load_draft(str(world.head), target)
    engine = Engine(target, make_proposer(EAGLE3, target, head=head, shape=TreeShape.chain(DEPTH)))
    prompts = first_prompts(target.tokenizer, parse_tasks(str(world.asked), ()))
    results = engine.generate([Request(p.tokens, SamplingParams(max_new_tokens=ANSWER)) for p in prompts])
    return {
        json.dumps(list(prompt.tokens)): {
            "tokens": list(result.tokens),
            "accepted": list(result.accepted),
            "text": target.tokenizer.decode(list(result.tokens), skip_special_tokens=True),
        }
        for prompt, result in zip(prompts, results, strict=True)
    }
