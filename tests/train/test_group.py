"""Runs of several processes: the head that one alone would make, and one end for all."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from tercel.cli.app import main
from tercel.errors import TercelError
from tercel.target_model.model import Target
from tercel.train.config import TrainConfig
from tercel.train.group import Place, joined
from tercel.train.learner import Learner
from tercel.train.loop import train
from tercel.train.make_features import make_features
from tercel.train.ranks import Alone, Ranks, collected, dealt
from tercel.train.run_folder import RunFolder
from tests.tiny import save_tiny
from tests.train.processes import together
from tests.train.worlds import random_chat, target_of

CHATS = [random_chat(12 + seed % 5, seed) for seed in range(22)]
CONFIG = TrainConfig(
    epochs=2, batch_tokens=30, accumulate=4, lr=2e-3, ttt_steps=2, draft_vocab=64, feature_layers=(2, 4, 5),
    eval_share=0.25, eval_every=2, save_every=100,
)  # fmt: skip
TOKENS = replace(CONFIG, average="token")


def run(ranks: Ranks, out: Path, config: TrainConfig = CONFIG, folder: Path | None = None, **more) -> list[float]:
    """Train, with the target of `folder` if one is given; gives what all ranks have to agree on."""
    target = target_of() if folder is None else Target.load(str(folder), sharding=config.target_sharding)
    summary = train(target, CHATS, config, out, ranks=ranks, **more)
    return [summary.best.tau, summary.best.loss, summary.steps]


def journal(out: Path) -> list[dict]:
    return [json.loads(line) for line in RunFolder(out).metrics.read_text().splitlines()]


def assert_same_run(a: Path, b: Path) -> None:
    """The same steps and evaluations, but for rounding."""
    mine, theirs = journal(a), journal(b)
    assert [(e["step"], "eval" in e, e.get("tokens")) for e in mine] == [
        (e["step"], "eval" in e, e.get("tokens")) for e in theirs
    ]
    for entry, other in zip(mine, theirs, strict=True):
        if "eval" in entry:
            assert entry["eval"]["tau"] == pytest.approx(other["eval"]["tau"], rel=1e-3)
            assert entry["eval"]["loss"] == pytest.approx(other["eval"]["loss"], rel=1e-5)
        else:
            for name in ("loss", "accuracy", "grad_norm", "lr"):
                assert entry[name] == pytest.approx(other[name], rel=1e-4), (entry["step"], name)
    states = [torch.load(RunFolder(out).state, weights_only=True)["head"] for out in (a, b)]
    for name, weights in states[0].items():
        torch.testing.assert_close(weights, states[1][name], rtol=1e-3, atol=1e-5)


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("alone") / "run"
    assert run(Alone(), out)[2] > 3
    return out


def test_batches_are_dealt_so_that_all_meet_equally_often_and_collected_in_order() -> None:
    batches = [[number] for number in range(7)]
    parts = [dealt(batches, rank, 3) for rank in range(3)]
    assert parts[1] == [[1], [4], []]
    assert collected([[batch for batch in part if batch] for part in parts]) == batches


@pytest.mark.parametrize("count", [2, 4])
def test_processes_make_the_run_that_one_makes(tmp_path: Path, alone: Path, count: int) -> None:
    """4, 2 x 2 and 4 x 1 micro-batches a step."""
    told = together(count, run, tmp_path / "r", CONFIG, None)
    assert all(one == told[0] for one in told)
    assert_same_run(tmp_path / "r", alone)


def test_also_where_a_mean_is_over_tokens_and_features_come_from_files(tmp_path: Path) -> None:
    files = tmp_path / "features"
    make_features(target_of(), CHATS, TOKENS.feature_layers, files, max_length=TOKENS.max_length)
    featured_run(Alone(), tmp_path / "one", files)
    told = together(3, featured_run, tmp_path / "three", files)  # the last rank has nothing to do at times
    assert len({tuple(one) for one in told}) == 1
    assert_same_run(tmp_path / "three", tmp_path / "one")


def featured_run(ranks: Ranks, out: Path, files: Path) -> list[float]:
    return run(ranks, out, TOKENS, features=files)


def stopped(ranks: Ranks, out: Path, after: int) -> list[float]:
    return run(ranks, out, stop_after=after)


def test_a_run_goes_on_with_another_number_of_processes(tmp_path: Path, alone: Path) -> None:
    together(2, stopped, tmp_path / "r", 1)
    run(Alone(), tmp_path / "r", stop_after=2)
    together(3, run, tmp_path / "r")
    assert_same_run(tmp_path / "r", alone)


def command(number: int, folder: Path, at: int, how: str) -> tuple[int, str, str]:
    """`tercel train` as one of several processes; process 1 is killed, or fails, in optimizer step `at`."""
    gradients = Learner.gradients

    def fatal(self: Learner, step: int):
        if step == at and number == 1:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise TercelError("the disk is full")
        return gradients(self, step)

    Learner.gradients = fatal
    out, err = folder / f"out{number}", folder / f"err{number}"
    sys.stdout, sys.stderr = out.open("w"), err.open("w")
    try:
        main(["train", str(folder / "llama"), "--config", str(folder / "recipe.yaml"), "--out", str(folder / "head")])
    except SystemExit as error:
        sys.stdout.flush(), sys.stderr.flush()
        return error.code, out.read_text(), err.read_text()


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    save_tiny(tmp_path, "llama")
    rows = [
        {"messages": [{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": f"the cat sat on {n}"}]}
        for n in range(24)
    ]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    recipe = {
        "data": str(tmp_path / "data.jsonl"), "epochs": 2, "batch-tokens": 128, "accumulate": 2, "ttt-steps": 2,
        "draft-vocab": 64, "eval-share": 0.25, "dtype": "float32", "device": "cpu",
    }  # fmt: skip
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    return tmp_path


@pytest.mark.parametrize("how", ["kill", "fail"])
def test_what_ends_one_process_ends_all_and_the_run_goes_on_with_one(commands: Path, how: str) -> None:
    first, second = together(2, command, commands, 1, how, join=False)
    assert first[0] == 2
    (line,) = first[2].strip().splitlines()
    assert line.startswith("error: process 0 of 2 stops, since another one is gone (")
    if how == "kill":
        assert second is None
    else:
        assert "process 1: the disk is full" in line
        assert second == (2, "", "error: the disk is full\n")
    state = torch.load(RunFolder(commands / "head").state, weights_only=True)
    assert state["step"] == 1  # what was done is kept, though no state was due
    (done, progress, _), (quiet, nothing, no_error) = together(2, command, commands, -1, how, join=False)
    assert (done, quiet) == (0, 0)
    assert "resuming after step 1" in progress
    assert (nothing, no_error) == ("", "")


def other_settings(ranks: Ranks, out: Path) -> list[float]:
    return run(ranks, out, replace(CONFIG, lr=1e-3) if ranks.rank == 1 else CONFIG)


def test_processes_with_other_settings_are_refused(tmp_path: Path) -> None:
    for sentence in together(2, other_settings, tmp_path / "r"):
        assert "process 1 has other settings, data or target than process 0" in sentence
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("sharding", ["fsdp", "tensor"])
def test_a_target_that_processes_share_teaches_the_same(tmp_path: Path, alone: Path, sharding: str) -> None:
    """Eleven micro-batches for two processes: one has fewer forwards to make, and helps."""
    folder = save_tiny(tmp_path, "llama")
    config = replace(CONFIG, target_sharding=sharding)
    told = together(2, shared, tmp_path / "r", config, folder)
    assert [one[:3] for one in told] == [told[0][:3]] * 2
    whole = sum(p.numel() for p in target_of().model.parameters())
    assert all(one[3] < 0.65 * whole for one in told)
    assert_same_run(tmp_path / "r", alone)


def shared(ranks: Ranks, out: Path, config: TrainConfig, folder: Path) -> list[float]:
    target = Target.load(str(folder), sharding=config.target_sharding)
    held = sum(getattr(p, "_local_tensor", p).numel() for p in target.model.parameters())
    assert target.fingerprint == target_of().fingerprint
    summary = train(target, CHATS, config, out, ranks=ranks)
    return [summary.best.tau, summary.best.loss, summary.steps, held]


def test_what_has_no_plan_or_no_company_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TercelError, match="target-sharding fsdp needs several processes"):
        Target.load(str(save_tiny(tmp_path, "llama")), sharding="fsdp")
    for sentence in together(2, load, save_tiny(tmp_path, "gpt2")):
        assert "transformers has no tensor-parallel plan for" in sentence
    assert "2 key heads, which cannot be divided among 3" in together(3, load, tmp_path / "llama")[0]


def load(ranks: Ranks, folder: Path) -> None:
    Target.load(str(folder), sharding="tensor")


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is not set"),
        ({"WORLD_SIZE": "2"}, "RANK is not set"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK is 2 and WORLD_SIZE 2"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK is 'x', not a whole number"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR is not"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "x"}, "MASTER_PORT is 'x'"),
    ],
)
def test_variables_that_make_no_run_are_refused(given: dict[str, str], part: str) -> None:
    with pytest.raises(TercelError, match=part):
        Place.of(given)


def test_a_single_process_needs_no_group() -> None:
    assert Place.of({}) is None
    assert Place.of({"RANK": "0", "WORLD_SIZE": "1"}) is None
    with joined(None) as ranks:
        assert ranks.count == 1


def test_each_process_has_a_device_of_its_own() -> None:
    place = Place(5, 8, 1)
    assert (place.device("cuda"), place.device("cpu")) == ("cuda:1", "cpu")
    with pytest.raises(TercelError, match="would be that of all 8"):
        place.device("cuda:1")


def test_processes_that_do_not_come_or_count_otherwise_are_named() -> None:
    sentences = together(2, miscounting, join=False)
    assert "WORLD_SIZE is 2 at rank 0 and 3 at rank 1" in sentences[0]
    # unless the first, which kept their common store, has gone by then
    assert "WORLD_SIZE is 3 at rank 1 and 2 at rank 0" in sentences[1] or "did not find each other" in sentences[1]
    (sentence,) = together(1, lonely, join=False, WORLD_SIZE="2")
    assert "the 2 processes of the run did not find each other at 127.0.0.1:" in sentence


def miscounting(number: int) -> None:
    with joined(Place(number, 2 + number, number), to_meet=timedelta(seconds=30)):
        pass


def lonely(number: int) -> None:
    with joined(Place(1, 2, 1), to_meet=timedelta(seconds=1)):
        pass
