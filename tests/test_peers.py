"""The comparison with other engines: who is asked when, what a failure costs, and what stands in the report."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peers
import pytest
import torch
from engine_process import EngineProcess
from interleaved import Asked
from line_protocol import Question
from peers_report import table
from surprise import excess

from tercel import Engine, Request, SamplingParams, Target, make_proposer
from tercel.errors import TercelError
from tests.tiny import save_tiny

ROOT = Path(__file__).parents[1]
FAKE = Path(__file__).with_name("fake_engine.py")
ENV = {**os.environ, "PYTHONPATH": str(ROOT / "engines")}
WARM = 99  # the first question's own limit is larger than that of the warm-up
Starters = dict[str, Callable[[], EngineProcess]]


def fake(folder: Path, name: str, **job: Any) -> Callable[[], EngineProcess]:
    whole = {"name": name, "notes": str(folder / "notes"), "tokens": [1, 2, 3, 4], "seconds": 2.0, **job}
    return lambda: EngineProcess(name, [sys.executable, FAKE], whole, folder / f"{name}.log", ENV)


def questions(*tasks: str, each: int = 2) -> list[Asked]:
    return [Asked(task, f"q{i}", Question([10 * t + i], WARM)) for t, task in enumerate(tasks) for i in range(each)]


def compared(starters: Starters, asked: list[Asked]) -> tuple[dict[str, Any], list[str], list[dict[str, Any]]]:
    said: list[str] = []
    kept: list[dict[str, Any]] = []
    _, found = peers.compare(starters, asked, {"settings": {}}, said.append, kept.append)
    return found, said, kept


def test_every_peer_answers_a_question_before_any_answers_the_next(tmp_path: Path) -> None:
    starters = {name: fake(tmp_path, name) for name in ("a", "b", "c")}
    compared(starters, questions("one", "two"))
    asked = [line.split() for line in (tmp_path / "notes").read_text().splitlines()]
    warm_up, rest = asked[:3], asked[3:]
    assert warm_up == [["a", "0", "96"], ["b", "0", "96"], ["c", "0", "96"]]
    assert [name for name, _, _ in rest] == [*"abc", *"bca", *"cab", *"abc"]  # who begins changes
    assert [prompt for _, prompt, _ in rest] == [p for p in ("0", "1", "10", "11") for _ in range(3)]
    assert {limit for _, _, limit in rest} == {str(WARM)}


def test_the_report_has_rates_ratios_acceptance_and_equal_texts(tmp_path: Path) -> None:
    starters = {
        "tercel-vanilla": fake(tmp_path, "tercel-vanilla", seconds=2.0),
        "vllm-vanilla": fake(tmp_path, "vllm-vanilla", seconds=1.0, tokens=[1, 2, 3, 5]),
        "vllm-eagle3": fake(tmp_path, "vllm-eagle3", seconds=0.5),
    }
    found, _, kept = compared(starters, questions("one", "two"))
    assert json.loads(json.dumps(found)) == found
    assert list(found["tasks"]) == ["one", "two"]
    own = found["tasks"]["one"]["vllm-eagle3"]
    assert own["tokens_per_s"] == pytest.approx(8.0)
    assert own["ci95"] == pytest.approx([8.0, 8.0])
    assert own["ms_per_token"] == pytest.approx(125.0)
    assert (own["questions"], own["tokens"], own["drafts"]) == (2, 8, 4)
    assert own["tau"] == pytest.approx(1.5)
    assert own["accepted_per_draft"] == [1.0, 0.5]
    assert own["same_text"] == {"as_own_vanilla": {"equal": 0, "of": 2}, "as_tercel_vanilla": {"equal": 2, "of": 2}}
    over = found["ratios"]["all"]["vllm-eagle3"]
    assert over["vllm-vanilla"] == {"ratio": pytest.approx(2.0), "ci95": pytest.approx([2.0, 2.0])}
    assert over["tercel-vanilla"]["ratio"] == pytest.approx(4.0)
    assert found["all"]["vllm-eagle3"]["questions"] == 4
    assert found["answers"]["two"]["q1"]["vllm-vanilla"]["seconds"] == 1.0
    about = found["peers"]["vllm-eagle3"]
    assert about["version"] == "7"
    assert about["peak_mb"] > 1
    assert found["failed"] == {}
    assert [list(part["tasks"]) for part in kept] == [["one"], ["one", "two"]]  # kept as tasks are done
    row = next(line for line in table(found).splitlines() if line.startswith("| vllm-eagle3"))
    assert "| 8.0 [8.00, 8.00] | 8.0 [8.00, 8.00] | 1.50 |  | 2.00 [2.00, 2.00] | 0 of 4 |" in row


def test_a_peer_that_fails_says_why_and_the_others_go_on(tmp_path: Path) -> None:
    starters = {
        "a": fake(tmp_path, "a"),
        "b": fake(tmp_path, "b", unloadable=True),
        "c": fake(tmp_path, "c", dies_at=5),  # the second question of the second task, after the warm-up
    }
    found, said, _ = compared(starters, questions("one", "two"))
    assert found["failed"].keys() == {"b", "c"}
    assert found["failed"]["b"] == f"b failed: no such model; its output is in {tmp_path / 'b.log'}"
    assert found["failed"]["c"] == f"c ended with code 3; its output is in {tmp_path / 'c.log'}"
    assert any(line.startswith("c is left out: c ended with code 3") for line in said)
    assert "a library's chatter" in (tmp_path / "c.log").read_text()
    assert found["tasks"]["one"].keys() == {"a", "c"}
    assert found["tasks"]["two"].keys() == found["all"].keys() == {"a"}  # never figures of half a task
    assert found["answers"]["two"]["q0"].keys() == {"a", "c"}


def test_nobody_left_is_an_empty_report(tmp_path: Path) -> None:
    found, _, _ = compared({"a": fake(tmp_path, "a", unloadable=True)}, questions("one"))
    assert found["tasks"] == {"one": {}}
    assert found["all"] == {}
    assert table(found)


def test_a_peer_that_never_rests_takes_no_time_while_others_answer(tmp_path: Path) -> None:
    starters = {"spins": fake(tmp_path, "spins", spins=True), "works": fake(tmp_path, "works", works=0.3)}
    found, _, _ = compared(starters, questions("one"))
    assert found["quiet"]["paused_s"]["spins"] <= 0.05


ORPHAN = """
import os, signal, sys
from pathlib import Path
from engine_process import EngineProcess
job = {"name": "a", "notes": "", "tokens": [1], "seconds": 1.0}
engine = EngineProcess("a", [sys.executable, sys.argv[1]], job, Path(sys.argv[2]), os.environ)
engine.pause()
print(engine._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_paused_peer_ends_with_whoever_paused_it(tmp_path: Path) -> None:
    env = {**ENV, "PYTHONPATH": f"{ROOT / 'engines'}:{ROOT / 'src'}"}
    command = [sys.executable, "-c", ORPHAN, str(FAKE), str(tmp_path / "a.log")]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    stat, deadline = Path(f"/proc/{int(done.stdout)}/stat"), time.monotonic() + 30
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline, "the paused process is still there"
        time.sleep(0.01)


def test_names_are_of_engines_or_peers() -> None:
    assert peers.chosen("vllm,tercel-chain") == [*[("vllm", m) for m in peers.PEERS["vllm"]], ("tercel", "chain")]
    assert len(peers.chosen(None)) == sum(map(len, peers.PEERS.values()))
    with pytest.raises(TercelError, match="no peer 'vlm'"):
        peers.chosen("tercel,vlm")


def test_sampled_texts_that_do_not_follow_the_target_are_noticed(tmp_path: Path) -> None:
    target = Target.load(str(save_tiny(tmp_path, "llama")))
    with torch.no_grad():  # a model whose next token is far from equally likely, and far from certain
        target.model.get_output_embeddings().weight.mul_(5)
    prompts = [[5, 6, 7 + i] for i in range(12)]
    asked = [Request(tuple(p), SamplingParams(temperature=1.0, seed=i, max_new_tokens=24, ignore_eos=True))
             for i, p in enumerate(prompts)]  # fmt: skip
    answers = [list(done.tokens) for done in Engine(target, make_proposer("vanilla", target)).generate(asked)]
    assert excess(target, prompts, answers, 1.0)["follows"]
    assert not excess(target, prompts, answers, 2.0)["follows"]  # had they been asked for at another temperature
    greedy = [Request(r.prompt, SamplingParams(max_new_tokens=24, ignore_eos=True)) for r in asked]
    likeliest = [list(done.tokens) for done in Engine(target, make_proposer("vanilla", target)).generate(greedy)]
    found = excess(target, prompts, likeliest, 1.0)
    assert not found["follows"]
    assert found["excess_nats"] < 0


def test_here_and_in_transformers_texts_are_the_same_and_what_is_missing_is_said(tmp_path: Path) -> None:
    """The drivers that need no environment of their own, with a small model."""
    target = save_tiny(tmp_path / "target", "llama")
    args = peers.settings(
        ["--target", str(target), "--peers", "transformers-lookup,transformers-assisted,tercel-vanilla,vllm", "--quick",
         "--max-new-tokens", "8", "--dtype", "float32", "--threads", "1", "--json", str(tmp_path / "found.json"),
         "--venvs", str(tmp_path), "--work", str(tmp_path / "work")]
    )  # fmt: skip
    said: list[str] = []
    found = peers.run(args, said.append)
    assert json.loads((tmp_path / "found.json").read_text()) == found
    assert found["failed"] == {}
    assert found["left_out"]["vllm-eagle3"] == "not installed; install it with: make vllm-venv"
    assert "--assistant" in found["left_out"]["transformers-assisted"]
    assert found["tasks"]["demo"].keys() == {"transformers-lookup", "tercel-vanilla"}
    for peer, summary in found["tasks"]["demo"].items():
        assert summary["same_text"]["as_tercel_vanilla"] == {"equal": 2, "of": 2}, peer
