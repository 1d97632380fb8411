"""From prompts to a measured head: regenerate, train, inspect, generate, verify, bench, chat, demo."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tercel.chat import Answer
from tercel.cli.train_progress import TrainProgress
from tercel.decode.responder import EngineResponder
from tercel.draft import load_head

from .conftest import RECIPE, World
from .running import everything, refused, run, run_program

EXACT = ["--dtype", "float32"]


def test_train_leaves_a_head_its_card_and_its_curves(world: World) -> None:
    for text in ("conversations to learn from", "draft vocabulary", "held-out acceptance", "tercel generate", "0-α"):
        assert text in world.log
    head = Path(world.head)
    names = {path.name for path in head.iterdir()}
    ours = {".tercel-run.json", ".tercel-files.json"}  # whose run this is, and what it wrote
    assert {"config.json", "model.safetensors", "tercel.json", "README.md", "last", "training"} == names - ours
    assert ours < names
    assert (head / "training" / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert str(head / "README.md") in world.log


def test_regenerated_answers_are_counted(tmp_path: Path, world: World) -> None:
    out = tmp_path / "answers.jsonl"
    long = json.dumps({"id": "long", "turns": ["cat " * 300]})
    more = tmp_path / "more.jsonl"
    more.write_text(long + "\n", encoding="utf-8")
    asked = ["data", "regenerate", str(world.prompts), str(more), "--target", world.target, "--head", world.head]
    asked += ["--max-new-tokens", "16", "--in-flight", "3", *EXACT, "--out"]
    ended = run(*asked, str(out))
    assert ended.code == 0, ended.err
    assert "20 answered + 0 failed + 1 skipped = 21 read" in ended.out
    # drafted, three at a time, or one by one without drafts: the same answers
    rows = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    before = [json.loads(line) for line in world.answers.read_text("utf-8").splitlines()]
    assert {row["id"]: row["answer_ids"] for row in rows} == {row["id"]: row["answer_ids"] for row in before}
    again = run(*asked, str(tmp_path / "again.jsonl"), "--answered", str(out))
    assert again.code == 2
    assert "none of the 1 conversations was answered: the prompt exceeds the context" in again.err


def test_interrupted_regeneration_goes_on(tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    asked = ["data", "regenerate", str(world.prompts), "--target", world.target, *EXACT]
    asked += ["--temperature", "1", "--max-new-tokens", "6", "--in-flight", "4", "--out"]
    assert run(*asked, str(whole)).code == 0

    answered = EngineResponder.poll
    polls = []

    def stopped(self: EngineResponder) -> list[Answer]:
        if len(polls) == 2:
            raise KeyboardInterrupt
        found = answered(self)
        polls.extend([1] if found else [])
        return found

    with monkeypatch.context() as patch:
        patch.setattr(EngineResponder, "poll", stopped)
        ended = run(*asked, str(cut))
    assert (ended.code, cut.exists()) == (130, False)
    assert "the same command resumes" in ended.err
    done = len((tmp_path / "cut.jsonl.part").read_text("utf-8").splitlines())
    assert 0 < done < 20
    again = run(*asked, str(cut))
    assert f"{20 - done} answered + 0 failed + {done} skipped = 20 read" in again.out
    assert sorted(cut.read_text("utf-8").splitlines()) == sorted(whole.read_text("utf-8").splitlines())


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_training_goes_on(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch, sent: signal.Signals, code: int
) -> None:
    out = tmp_path / "head"
    command = ["train", world.target, "--data", str(world.answers), "--out", str(out), *RECIPE]
    step = TrainProgress.stepped

    def stopped(self: TrainProgress, number: int, metrics: dict[str, float]) -> None:
        step(self, number, metrics)
        if number == 3:
            signal.raise_signal(sent)

    with monkeypatch.context() as patch:
        patch.setattr(TrainProgress, "stepped", stopped)
        ended = run(*command)
    assert ended.code == code
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert "the same command resumes" in ended.err
    assert not (out / "model.safetensors").exists()
    again = run(*command)
    assert again.code == 0
    assert "resuming after step 3" in again.out
    assert (out / "model.safetensors").read_bytes() == (Path(world.head) / "model.safetensors").read_bytes()
    assert "steps already" in run(*command).out


def test_train_takes_flags_from_yaml(tmp_path: Path, world: World) -> None:
    settings = tmp_path / "recipe.yaml"
    values = ["epochs: 1", "batch-tokens: 300", "draft_vocab: 40", "feature-layers: [1, 3]", "lr: 1e-3"]
    values += [f"data: [{world.answers}]", "eval-share: 0.2", "ttt-steps: 2", "fc-norm: true", "limit: null"]
    settings.write_text("\n".join(values), encoding="utf-8")
    out = tmp_path / "head"
    given = ["--config", str(settings), "--out", str(out), "--draft-vocab", "50", *EXACT]
    ended = run("train", world.target, *given)
    assert ended.code == 0, ended.err
    recipe = json.loads((out / "tercel.json").read_text("utf-8"))["training"]["recipe"]
    expected = {"epochs": 1, "batch_tokens": 300, "feature_layers": [1, 3], "lr": 1e-3, "fc_norm": True}
    assert {key: recipe[key] for key in expected} == expected
    assert recipe["draft_vocab"] == 50  # a flag wins over the file


def test_train_plan_tells_and_writes_nothing_else(tmp_path: Path, world: World) -> None:
    out, told = tmp_path / "head", tmp_path / "plan.json"
    command = ["train", world.target, "--data", str(world.answers), "--out", str(out), *RECIPE]
    ended = run(*command, "--plan", "--json", str(told))
    assert ended.code == 0, ended.err
    assert "held-out τ" in ended.out
    assert not out.exists()
    plan = json.loads(told.read_text("utf-8"))
    assert plan["steps"] == json.loads((Path(world.head) / "tercel.json").read_text("utf-8"))["training"]["steps"]
    assert plan["seconds"] > 0 < plan["tau"]
    refused(run(*command, "--json", str(told)), "--json is for a forecast; give --plan with it")


def test_inspect(tmp_path: Path, world: World) -> None:
    out = tmp_path / "head.json"
    ended = run("inspect", world.head, "--json", str(out))
    assert ended.code == 0, ended.err
    assert "midlayer.self_attn.q_proj.weight" in ended.out
    assert "inputs of layers 2, 4, 5 of 8" in ended.out
    report = json.loads(out.read_text("utf-8"))
    shapes = {tensor["name"]: tensor["shape"] for tensor in report["tensors"]}
    assert shapes["fc.weight"] == [32, 96]
    assert shapes["lm_head.weight"] == [64, 32]
    # by hand: q 32x64, k and v 16x64 each, o 32x32, three MLP matrices 64x32, lm_head 64x32
    assert report["cost"]["drafted_macs"] == 32 * 64 + 2 * 16 * 64 + 32 * 32 + 3 * 64 * 32 + 64 * 32
    assert report["cost"]["fuse_macs"] == 96 * 32
    assert report["cost"]["kv_bytes"] == 2 * 16 * 2
    norms = 4 * 32
    matrices = report["cost"]["drafted_macs"] + report["cost"]["fuse_macs"]
    assert report["parameters"] == matrices + norms
    assert report["measured"]["held_out"]["tau"] >= 1


def test_generate_is_the_same_with_and_without_drafts(tmp_path: Path, world: World) -> None:
    asked = [
        "generate",
        world.target,
        world.head,
        "--prompt",
        "the cat sat",
        "--max-new-tokens",
        "24",
        *EXACT,
    ]
    texts = []
    for number, drafts in enumerate((["--tree", "10x8x60"], ["--tree", "chain:3"], [], ["--draft", "none"])):
        out = tmp_path / f"{number}.json"
        ended = run(*asked, *drafts, "--json", str(out))
        assert ended.code == 0, ended.err
        result = json.loads(out.read_text("utf-8"))
        assert ended.out == result["text"] + "\n"
        assert len(result["tokens"]) == 24
        texts.append(result["tokens"])
    assert texts == 4 * texts[:1]


def test_generate_sampled_reads_standard_input_and_stops(world: World) -> None:
    asked = ["generate", world.target, world.head, "--raw", "--temperature", "1", "--seed", "5", *EXACT]
    first = run(*asked, "--max-new-tokens", "30", stdin="the cat")
    assert first.code == 0
    assert run(*asked, "--max-new-tokens", "30", stdin="the cat").out == first.out
    piece = first.out[4:6]
    cut = run(*asked, "--max-new-tokens", "30", "--stop", piece, stdin="the cat")
    assert cut.out == first.out[: first.out.index(piece)] + "\n"
    biased = run(*asked, "--max-new-tokens", "5", "--logit-bias", "36=1000", stdin="the cat")
    assert biased.out == "A" * 5 + "\n"


def test_generate_shows_what_was_drafted(world: World) -> None:
    asked = [
        "generate",
        world.target,
        world.head,
        "--prompt",
        "the cat sat",
        "--max-new-tokens",
        "24",
        *EXACT,
    ]
    ended = run(*asked, "--show")
    lines = ended.out.splitlines()
    assert lines[0] == "green: drafted and accepted; plain: the target's own"
    assert "\n".join(lines[1:-1]) + "\n" == run(*asked).out
    assert lines[-1].startswith("24 tokens in ")
    assert "τ" in lines[-1]


def test_verify_and_its_exit_code(tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "verify.json"
    asked = ["verify", world.target, world.head, "--tasks", f"{world.prompts}:4", "--max-new-tokens", "12"]
    asked += ["--samples", "4", "--sampled-tokens", "4", "--json", str(out)]
    ended = run(*asked)
    assert ended.code == 0, ended.out
    assert "lossless" in ended.out
    report = json.loads(out.read_text("utf-8"))
    assert report["ok"]
    assert report["greedy"]["tokens"] > 40

    import tercel.decode.judge as judge
    from tercel.decode.verify import Verdict, verify

    def faulty(tree, *rest, **more):  # type: ignore[no-untyped-def]
        verdict = verify(tree, *rest, **more)
        return verdict if len(tree) == 1 else Verdict(verdict.path, verdict.accepted, (verdict.own + 1) % 100)

    monkeypatch.setattr(judge, "verify", faulty)
    ended = run(*asked, "--check", "greedy")
    assert ended.code == 1
    assert "NOT lossless" in ended.out
    assert not json.loads(out.read_text("utf-8"))["ok"]


def test_bench(tmp_path: Path, world: World) -> None:
    out, plot = tmp_path / "bench.json", tmp_path / "bench.png"
    asked = ["bench", world.target, world.head, "--tasks", f"{world.prompts.name.removesuffix('.jsonl')}:3"]
    asked += ["--data-dir", str(world.prompts.parent), "--max-new-tokens", "10", "--n-alpha", "2", *EXACT]
    ended = run(*asked, "--json", str(out), "--plot", str(plot))
    assert ended.code == 0, ended.err
    assert "eagle3: " in ended.out
    assert "n-α: " in ended.out
    report = json.loads(out.read_text("utf-8"))
    assert set(report["tasks"]["prompts"]) == {"vanilla", "transformers", "eagle3"}
    assert report["tasks"]["prompts"]["eagle3"]["identical"] == 1
    assert len(report["n_alpha"]) == 2
    assert plot.read_bytes().startswith(b"\x89PNG")
    refused(run(*asked, "--plot", str(tmp_path / "bench.txt")), "no name of a picture", ".png or .svg")


def test_chat(world: World) -> None:
    talk = "the cat sat\n/wrong\nthe rain\n/reset\nthe cat sat\n" + "cat " * 300 + "\n/quit\nnever read\n"
    ended = run("chat", world.target, world.head, "--max-new-tokens", "8", *EXACT, stdin=talk)
    assert ended.code == 0, ended.err
    assert "there is no command /wrong" in ended.out
    assert "the conversation has grown to" in ended.out
    assert "/reset starts a new one" in ended.out
    asked = ["generate", world.target, world.head, "--max-new-tokens", "8", *EXACT, "--prompt", "the cat sat"]
    assert ended.out.count(run(*asked).out) == 2  # before and after /reset alike


def test_demo(tmp_path: Path, world: World) -> None:
    out = tmp_path / "demo"
    asked = ["demo", world.target, world.head, "--out", str(out), "--questions", "2", "--max-new-tokens", "6"]
    ended = run(*asked, *EXACT)
    assert ended.code == 0, ended.err
    assert {path.name for path in out.iterdir()} == {"demo.json", "demo.png", "demo.html"}
    assert "tercel train" in ended.out
    page = (out / "demo.html").read_text("utf-8")
    assert "EAGLE-3" in page
    assert 'class="bars"' in page


def test_as_a_program(world: World) -> None:
    assert run_program("--version").out.startswith("tercel ")
    asked = ["generate", world.target, world.head, "--prompt", "the cat sat", "--max-new-tokens", "8", *EXACT]
    ended = run_program(*asked)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out == run(*asked).out


LIGHT = """
import sys
from tercel.cli.app import main

for arguments in ("--help", "inspect ./no", "export ./no --to vllm --out made", "serve-command ./no --engine vllm"):
    try:
        main(arguments.split())
    except SystemExit as ended:
        print(ended.code)
print([m for m in ("torch", "transformers", "numpy", "matplotlib") if m in sys.modules])
"""


def test_help_and_wrong_heads_are_fast_because_nothing_heavy_is_imported() -> None:
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-5:] == ["0", "2", "2", "2", "[]"]
    assert done.stderr.count("there is no head ./no;") == 3


def test_nothing_is_written_by_looking(tmp_path: Path, world: World) -> None:
    before = everything(Path(world.head))
    assert run("inspect", world.head).code == 0
    assert everything(Path(world.head)) == before


def test_features_are_made_once_and_trained_from(tmp_path: Path, world: World) -> None:
    out, head = tmp_path / "features", tmp_path / "head"
    asked = ["features", world.target, "--data", str(world.answers), "--out", str(out), "--store", "int8", *EXACT]
    train = ["train", world.target, "--data", str(world.answers), "--features", str(out), "--out", str(head), *RECIPE]
    refused(run(*train), str(out), "holds no features; make them with `tercel features`")
    made = run(*asked, "--limit", "10")
    assert made.code == 0, made.err
    assert "GB are free" in made.out
    assert f"--features {out}" in made.out
    refused(run(*train), "lacks the features of", "run `tercel features` with the same data")
    assert "more conversations have their features already" in run(*asked).out
    assert "0 conversations of 0 tokens" in run(*asked).out
    trained = run(*train, "--max-steps", "4")
    assert trained.code == 0, trained.err
    assert load_head(head).info.training.step
    refused(run(*asked, "--feature-layers", "2;3"), "is not a list of layer numbers")
    before = everything(tmp_path)
    other = [*asked[:4], "--out", str(tmp_path / "other"), *EXACT]
    refused(run(*other, "--feature-layers", "2,99"), "feature layer 99 is out of range")
    assert everything(tmp_path) == before
