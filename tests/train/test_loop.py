"""Whole runs: learning, stopping, resuming bit for bit, and refusing."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tercel.draft import load_head
from tercel.draft.history import HeldOut
from tercel.errors import TercelError
from tercel.measure.record import record
from tercel.stopping import Terminated, terminable
from tercel.train import state as state_module
from tercel.train.acceptance import simulate
from tercel.train.batches import split, usable
from tercel.train.config import TrainConfig
from tercel.train.failure import FailedStep, compute_again
from tercel.train.features import FeatureSupply
from tercel.train.learner import SETTLED, Learned, Learner
from tercel.train.lesson import lesson_of
from tercel.train.loop import _Run, train
from tercel.train.make_features import make_features
from tercel.train.run_folder import RunFolder
from tercel.train.run_writer import bytes_a_weight
from tercel.train.state import load_state
from tests.measure.test_record import entry
from tests.train.worlds import random_chat, target_of

CHATS = [random_chat(12 + seed % 5, seed) for seed in range(14)]
SMALL = TrainConfig(
    epochs=3,
    batch_tokens=40,
    accumulate=2,
    lr=2e-3,
    ttt_steps=2,
    draft_vocab=64,
    feature_layers=(2, 4, 5),
    eval_share=0.2,
    eval_every=2,
    save_every=2,
)


class Recorder:
    """A watcher that notes what it is told, and raises `error` once at a step."""

    def __init__(self, error: BaseException | None = None, at: int = 0) -> None:
        self.error, self.at = error, at
        self.begun: list[tuple[int, int]] = []
        self.steps: list[int] = []
        self.taus: list[float] = []

    def started(self, step, steps, facts):
        self.begun.append((step, steps))

    def warned(self, sentence):
        raise AssertionError(sentence)

    def stepped(self, step, metrics):
        self.steps.append(step)
        if self.error is not None and step == self.at:
            raise self.error

    def evaluated(self, step, acceptance):
        self.taus.append(acceptance.tau)


def run(out: Path, config: TrainConfig = SMALL, dtype=torch.float32, chats=CHATS, **more):
    return train(target_of("llama", dtype), chats, config, out, **more)


def outcome(out: Path) -> tuple[dict, list]:
    """Weights, optimizer and best heads of a run, and its journal without the clock."""
    folder = RunFolder(out)
    stored = torch.load(folder.state, weights_only=True)
    heads = {
        f"{where}.{name}": tensor
        for where, path in (("best", out), ("last", folder.last))
        for name, tensor in load_head(path).head.named_parameters()
    }
    parts = stored["optimizer"] if "muon" in stored["optimizer"] else {"adamw": stored["optimizer"]}
    moments = {
        f"{part}.{i}.{k}": v
        for part, own in parts.items()
        for i, s in own["state"].items()
        for k, v in s.items()
    }
    rows = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    for row in rows:
        row.pop("seconds", None)
    best = json.loads((out / "tercel.json").read_text())["training"]["step"]
    return {**stored["head"], **moments, **heads, "step": torch.tensor([stored["step"], best])}, rows


def same(a: Path, b: Path) -> None:
    (mine, my_rows), (theirs, their_rows) = outcome(a), outcome(b)
    assert mine.keys() == theirs.keys()
    for name in mine:
        assert torch.equal(mine[name], theirs[name]), name
    assert my_rows == their_rows


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """One uninterrupted run, what the others must equal."""
    out = tmp_path_factory.mktemp("whole") / "run"
    summary = run(out)
    assert summary.steps >= 6
    return out


def test_a_stopped_run_goes_on_bit_for_bit(tmp_path, whole):
    first = run(tmp_path / "r", stop_after=3)
    assert first.steps == 3
    watcher = Recorder()
    summary = run(tmp_path / "r", watcher=watcher)
    assert watcher.begun == [(3, summary.steps)]
    assert watcher.steps == list(range(4, summary.steps + 1))
    same(tmp_path / "r", whole)


def test_also_in_bfloat16_with_features_from_files(tmp_path):
    target, files = target_of(dtype=torch.bfloat16), tmp_path / "features"
    make_features(target, CHATS, SMALL.feature_layers, files, max_length=SMALL.max_length)
    run(tmp_path / "a", dtype=torch.bfloat16, features=files)
    run(tmp_path / "b", dtype=torch.bfloat16, features=files, stop_after=1)
    run(tmp_path / "b", dtype=torch.bfloat16, features=files)
    same(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize("at", [1, 3])
def test_a_killed_run_goes_on_from_its_last_state(tmp_path, whole, at):
    with pytest.raises(SystemExit):
        run(tmp_path / "r", watcher=Recorder(SystemExit(), at))
    with RunFolder(tmp_path / "r").metrics.open("a") as stream:
        stream.write('{"step": 4, "lo')  # and the power failed in the middle of a line
    run(tmp_path / "r")
    same(tmp_path / "r", whole)
    steps = [row["step"] for row in outcome(tmp_path / "r")[1] if "loss" in row]
    assert steps == list(range(1, len(steps) + 1))


def test_ctrl_c_saves_the_state(tmp_path, whole):
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "r", watcher=Recorder(KeyboardInterrupt(), 3))
    assert torch.load(RunFolder(tmp_path / "r").state, weights_only=True)["step"] == 3
    run(tmp_path / "r")
    same(tmp_path / "r", whole)


def test_muon_steps_matrices_and_goes_on_bit_for_bit(tmp_path):
    config = replace(SMALL, optimizer="muon", epochs=1)
    run(tmp_path / "whole", config)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "r", config, watcher=Recorder(KeyboardInterrupt(), 2))
    stored = torch.load(RunFolder(tmp_path / "r").state, weights_only=True)["optimizer"]
    head = load_head(tmp_path / "whole").head
    matrices = [p for n, p in head.named_parameters() if p.ndim == 2 and "lm_head" not in n]
    assert len(stored["muon"]["state"]) == len(matrices) > 0
    assert all(set(moments) == {"momentum_buffer"} for moments in stored["muon"]["state"].values())
    run(tmp_path / "r", config)
    same(tmp_path / "r", tmp_path / "whole")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_middle_of_an_update_waits_for_its_end(tmp_path, whole, monkeypatch, number):
    update, calls = torch.optim.AdamW.step, []

    def interrupted(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            signal.raise_signal(number)
        return update(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", interrupted)
        with pytest.raises(KeyboardInterrupt) as stop, terminable():
            run(tmp_path / "r")
    assert (type(stop.value) is Terminated) == (number == signal.SIGTERM)
    assert torch.load(RunFolder(tmp_path / "r").state, weights_only=True)["step"] == 3
    run(tmp_path / "r")
    same(tmp_path / "r", whole)


def test_ctrl_c_in_an_evaluation_makes_it_again(tmp_path, whole, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("tercel.train.loop.simulate_batch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "r")
    assert torch.load(RunFolder(tmp_path / "r").state, weights_only=True)["step"] == 2
    run(tmp_path / "r")
    same(tmp_path / "r", whole)


def test_what_a_run_gave_is_what_its_best_head_reached_whatever_the_journal_says(tmp_path, whole):
    shutil.copytree(whole, tmp_path / "r")
    file = RunFolder(tmp_path / "r").metrics
    entries = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    true = max(entry["eval"]["tau"] for entry in entries if "eval" in entry)
    next(entry for entry in entries if "eval" in entry)["eval"]["tau"] = 9.0
    file.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    best = run(tmp_path / "r").best
    assert best.tau == true
    assert vars(best) == vars(load_head(whole).info.measured.held_out)


def test_a_run_ends_early_when_the_held_out_tau_stays_and_goes_on_when_asked(tmp_path, whole, monkeypatch):
    config = replace(SMALL, eval_every=1, patience=2)
    taus = iter([1.5, 1.6, 1.6, 1.5, 1.7])
    measured = HeldOut(alpha=(0.5, 0.1), tau=1.0, steps=9, loss=2.0)
    monkeypatch.setattr(_Run, "_measure", lambda self: replace(measured, tau=next(taus, 1.9)))
    first = run(tmp_path / "r", config)
    assert first.steps == 4
    assert first.best.tau == 1.6
    (note,) = first.notes
    assert note.startswith("ended after step 4 of ")
    assert "2 evaluations brought no better τ" in note
    assert torch.load(RunFolder(tmp_path / "r").state, weights_only=True)["step"] == 4
    assert run(tmp_path / "r", config).steps == 4
    on = run(tmp_path / "r", replace(config, patience=3, eval_every=2))
    assert on.steps > 4
    assert on.notes == ()
    weights, _ = outcome(tmp_path / "r")
    for name, tensor in outcome(whole)[0].items():  # what is learned is the same
        if not name.startswith(("best.", "step")):
            assert torch.equal(weights[name], tensor), name


def test_a_finished_run_is_left_as_it_is(whole):
    before = outcome(whole)
    summary = run(whole)
    assert summary.best.tau == max(row["eval"]["tau"] for row in before[1] if "eval" in row)
    assert outcome(whole)[1] == before[1]


@pytest.mark.parametrize(
    "other",
    [
        {"config": TrainConfig(**{**vars(SMALL), "lr": 1e-3})},
        {"chats": CHATS[1:]},
        {"dtype": torch.bfloat16},
    ],
)
def test_another_run_into_the_same_folder_is_refused(whole, other):
    before = RunFolder(whole).metrics.read_bytes()
    with pytest.raises(TercelError, match="holds a run with other settings, data or target; choose another --out"):
        run(whole, **other)
    assert RunFolder(whole).metrics.read_bytes() == before


def test_overwrite_begins_anew(tmp_path):
    run(tmp_path / "r", stop_after=2)
    other = TrainConfig(**{**vars(SMALL), "seed": 1})
    watcher = Recorder()
    run(tmp_path / "r", other, overwrite=True, watcher=watcher, stop_after=1)
    assert watcher.begun[0][0] == 0
    assert [row["step"] for row in outcome_rows(tmp_path / "r")] == [1]


def outcome_rows(out: Path) -> list[dict]:
    return [json.loads(line) for line in RunFolder(out).metrics.read_text().splitlines()]


@pytest.mark.parametrize("seed", [0, 1])
def test_a_head_whose_state_is_gone_is_not_written_over(tmp_path, seed):
    run(tmp_path / "r", stop_after=1)  # before the first evaluation: the last head is the only one
    last = RunFolder(tmp_path / "r").last / "model.safetensors"
    before = last.read_bytes()
    shutil.rmtree(RunFolder(tmp_path / "r").training)
    with pytest.raises(TercelError, match=r"is gone, so it cannot resume|with other settings"):
        run(tmp_path / "r", replace(SMALL, seed=seed))
    assert last.read_bytes() == before


def test_settings_that_fail_do_not_cost_the_old_run(tmp_path):
    run(tmp_path / "r", stop_after=1)
    wrong = TrainConfig(**{**vars(SMALL), "feature_layers": (2, 99)})
    with pytest.raises(TercelError, match="feature layer 99 is out of range"):
        run(tmp_path / "r", wrong, overwrite=True)
    assert RunFolder(tmp_path / "r").state.is_file()


@pytest.mark.parametrize("oov", ["drop", "keep"])
@pytest.mark.parametrize("average", ["sequence", "token"])
def test_accumulated_batches_learn_what_one_large_batch_does(tmp_path, average, oov):
    runs = []
    for batch_tokens, accumulate in ((10_000, 1), (40, 100)):
        config = replace(
            SMALL,
            epochs=1,
            batch_tokens=batch_tokens,
            accumulate=accumulate,
            average=average,
            oov=oov,
            ttt_steps=5,  # most chats have no row left at the last
        )
        out = tmp_path / f"{accumulate}"
        runs.append((run(out, config).history[0], torch.load(RunFolder(out).state, weights_only=True)["head"]))
    (one, head), (many, other) = runs
    assert many["loss"] == pytest.approx(one["loss"], rel=1e-6)
    assert many["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)
    for name, weights in head.items():
        torch.testing.assert_close(other[name], weights, rtol=1e-5, atol=1e-5)


def test_a_full_disk_is_told_and_the_run_can_go_on(tmp_path, whole, monkeypatch):
    def half(value, path):
        Path(path).write_bytes(b"half")
        full()

    run(tmp_path / "r", stop_after=3)
    with monkeypatch.context() as patch:
        patch.setattr(state_module.torch, "save", half)
        with pytest.raises(TercelError, match="No space left on device"):
            run(tmp_path / "r")
    assert [p.name for p in RunFolder(tmp_path / "r").training.glob(".*")] == [".tercel-files.json"]
    run(tmp_path / "r")
    same(tmp_path / "r", whole)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:500])


def flip(path: Path) -> None:
    """One bit, in the middle of the file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [cut, flip, Path.unlink])
def test_a_damaged_state_is_told(tmp_path, damage):
    run(tmp_path / "r", stop_after=1)
    damage(RunFolder(tmp_path / "r").state)
    with pytest.raises(TercelError, match=r"state.pt is missing or damaged.*start over with --overwrite"):
        run(tmp_path / "r")
    assert load_state(tmp_path, "key") is None


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tercel.json"])
@pytest.mark.parametrize("damage", [cut, flip, Path.unlink])
def test_damaged_heads_are_written_again(tmp_path, whole, damage, name):
    """Also those of a run that has ended, whose best head is of an earlier step than its state."""
    out = Path(shutil.copytree(whole, tmp_path / "r"))
    damage(out / name)
    damage(out / "last" / name)
    summary = run(out)
    assert [note for note in summary.notes if name in note and "missing or damaged" in note] == list(summary.notes)
    assert len(summary.notes) == 2
    same(out, whole)
    assert {p.name: p.read_bytes() for p in out.iterdir() if p.is_file()} == {
        p.name: p.read_bytes() for p in whole.iterdir() if p.is_file()
    }
    assert run(out).notes == ()


def test_a_damaged_journal_is_no_fault_of_the_run(tmp_path, whole):
    run(tmp_path / "r", stop_after=3)
    with RunFolder(tmp_path / "r").metrics.open("ab") as stream:
        stream.write(b'[1]\n{"step": 1, "eval": 3}\n\xff\xfe\n' + b"[" * 10_000 + b"\n")
    (note,) = run(tmp_path / "r").notes
    assert "metrics.jsonl, line 5: [1] is not an object; it is left out, with 3 more after it" in note
    same(tmp_path / "r", whole)
    assert run(tmp_path / "r").notes == ()


def test_results_recorded_with_a_head_outlive_the_same_command_again(tmp_path, whole):
    out = Path(shutil.copytree(whole, tmp_path / "r"))
    record(load_head(out), entry())
    assert run(out).notes == ()
    assert load_head(out).info.measured.decoding == (entry(),)


def test_what_a_user_lays_beside_a_run_stays(tmp_path, whole):
    out = tmp_path / "r"
    run(out, stop_after=2)
    mine = {"notes.txt": b"mine", ".git/HEAD": b"ref", "last/notes.txt": b"too", "training/x.csv": b"1,2"}
    for name, data in mine.items():
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_bytes(data)
    (out / "README.md").write_text("my own card")
    run(out)
    same(out, whole)
    for _ in range(2):
        assert {name: (out / name).read_bytes() for name in mine} == mine
        assert (out / "README.md").read_text() == "my own card"
        run(out, TrainConfig(**{**vars(SMALL), "seed": 1}), overwrite=True, stop_after=2)


def test_files_of_somebody_else_in_the_way_are_found_before_the_first_step(tmp_path):
    run(tmp_path / "r", stop_after=1)
    (tmp_path / "r" / "config.json").write_text("{}")
    with pytest.raises(TercelError, match=r"holds a config\.json that tercel did not write there"):
        run(tmp_path / "r")
    assert (tmp_path / "r" / "config.json").read_text() == "{}"


def test_only_one_process_trains_into_a_folder(tmp_path, whole):
    refusals = []

    class Second(Recorder):
        def stepped(self, step, metrics):
            with pytest.raises(TercelError, match=f"r is being written by another process .*{os.getpid()}") as told:
                run(tmp_path / "r")
            refusals.append(told)

    run(tmp_path / "r", watcher=Second())
    assert len(refusals) > 3
    same(tmp_path / "r", whole)


def test_into_a_link_and_into_the_folder_one_is_in(tmp_path, whole, monkeypatch):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    (tmp_path / "later").symlink_to(tmp_path / "not yet")
    for out in (tmp_path / "link", tmp_path / "later"):
        run(out, stop_after=2)
        run(out)
        assert out.is_symlink()
        same(out, whole)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    run(Path("."))
    same(tmp_path / "here", whole)


def test_a_disk_without_room_is_told_before_the_first_step(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=10**9, free=10_000))
    with pytest.raises(TercelError, match=r"needs room for \d+ MB, but the disk has 0 MB left"):
        run(tmp_path / "r")
    assert not RunFolder(tmp_path / "r").metrics.exists()


def test_what_is_there_once_needs_room_only_to_be_replaced():
    assert bytes_a_weight(averaged=True) - bytes_a_weight(averaged=False) == 2 * 4  # float32
    assert bytes_a_weight(averaged=True, begun=True) - bytes_a_weight(averaged=False, begun=True) == 4


def spoilt(update: Callable[..., None]) -> Callable[..., None]:
    """An update after which a weight is no number."""

    def spoil(self: Learner, rate: float) -> None:
        update(self, rate)
        with torch.no_grad():
            self.weights.master.fc.weight[0, 0] = torch.nan
        self.weights.refresh()

    return spoil


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loss_that_explodes_stops_the_run_and_its_batch_is_kept_for_a_repro(tmp_path, monkeypatch, dtype):
    run(tmp_path / "r", stop_after=2, dtype=dtype)
    folder = RunFolder(tmp_path / "r")
    with monkeypatch.context() as patch:
        patch.setattr(Learner, "update", spoilt(Learner.update))
        words = r"the loss became nan .* at step 4; .*training/not-finite\.safetensors and its \.json have the batch"
        with pytest.raises(TercelError, match=words + ".*; start again with a lower --lr"):
            run(tmp_path / "r", dtype=dtype)
    assert torch.load(folder.state, weights_only=True)["step"] == 2
    told = json.loads(folder.failure.with_suffix(".json").read_text("utf-8"))
    assert told["step"] == 4
    assert len(told["micro_batches"]) == SMALL.accumulate
    assert all(math.isnan(loss) for loss in compute_again(folder.failure, target_of("llama", dtype)))
    run(tmp_path / "r", SMALL, dtype, overwrite=True, stop_after=1)
    assert not folder.failure.exists()


@pytest.mark.parametrize("settings", [{}, {"prompt_weight": 0.5, "dropout": 0.2, "step_inputs": "drafts"}])
def test_a_kept_step_gives_the_very_loss_again(tmp_path, settings):
    """Of a step that went well, so that the numbers can be compared."""
    found = {}

    def keep(self: Learner, number: int) -> Learned:
        learned = gradients(self, number)
        groups = [[self.chats[i] for i in indices] for indices in self.mine[number]]
        step = FailedStep(number, learned.loss, learned.grad_norm, groups, [learned.loss])
        step.write(self, tmp_path / "s.safetensors")
        found["loss"] = learned.loss
        return learned

    gradients = Learner.gradients
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learner, "gradients", keep)
        run(tmp_path / "r", replace(SMALL, accumulate=1, **settings), stop_after=1)
    assert compute_again(tmp_path / "s.safetensors", target_of("llama")) == [found["loss"]]
    if not settings:  # as a version told it that did not know the setting
        told = json.loads((tmp_path / "s.json").read_text("utf-8"))
        del told["settings"]["prompt_weight"]
        (tmp_path / "s.json").write_text(json.dumps(told), "utf-8")
        assert compute_again(tmp_path / "s.safetensors", target_of("llama")) == [found["loss"]]


def test_a_step_that_cannot_be_kept_is_told_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(Learner, "update", spoilt(Learner.update))
    monkeypatch.setattr("tercel.train.failure.save_file", lambda *_: full())
    with pytest.raises(TercelError, match=r"at step 2 \(the batch was not kept: .*No space left.*\); start again"):
        run(tmp_path / "r")


def full() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_the_head_on_disk_drafts_as_the_one_that_was_measured(tmp_path):
    """Whatever training does to the features on the way, the file works on the target's own."""
    target = target_of("llama")
    config = TrainConfig(**{**vars(SMALL), "epochs": 1})
    summary = run(tmp_path / "r", config)
    model = load_head(tmp_path / "r")
    held = split(usable(CHATS, config.max_length, target.vocab_size), config.eval_share).held_out
    supply = FeatureSupply(target, model.head, model.vocabulary)
    again = simulate(lesson_of(config), model.head, [supply.batch(held)], supply.to_draft)
    assert again.steps == summary.best.steps
    assert again.loss == pytest.approx(summary.best.loss, rel=0.01)  # the file is in bfloat16


def test_a_head_that_has_learned_is_not_moved_before_gradients_are_known(tmp_path, whole):
    """Its first update is none of equal steps for all weights, and a run stopped meanwhile ends as one that was not."""
    config = replace(SMALL, start_from=str(whole), lr=1e-2, warmup=0.0)
    first = load_head(whole).head
    run(tmp_path / "one", config, stop_after=1)
    stored = torch.load(RunFolder(tmp_path / "one").state, weights_only=True)
    moved = torch.cat([(stored["head"][n].float() - w).abs().flatten() for n, w in first.named_parameters()])
    assert moved.max() > 0
    equal = ((moved > 0.9e-2) & (moved < 1.1e-2)).float().mean()  # of AdamW's very first update: nearly all
    assert equal < 0.05
    steps = min(SETTLED, load_head(tmp_path / "one" / "last").info.training.steps)
    assert {int(state["step"]) for state in stored["optimizer"]["state"].values()} == {1 + steps}

    def interrupted(self: Learner, rate: float) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learner, "update", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "two", config)
    for out in (tmp_path / "one", tmp_path / "two"):
        run(out, config)
    same(tmp_path / "one", tmp_path / "two")


@pytest.mark.parametrize("size", [0, 64])
def test_a_frozen_output_layer_stays_the_targets(tmp_path, size):
    target = target_of()
    run(tmp_path / "head", replace(SMALL, freeze_lm_head=True, draft_vocab=size))
    model = load_head(tmp_path / "head" / "last")
    rows = target.output_layer.rows(model.vocabulary.ids)
    assert len(model.vocabulary) == (size or target.vocab_size)
    assert torch.equal(model.head.lm_head.weight, rows.to(torch.bfloat16).float())
    assert not torch.equal(model.head.norm.weight, torch.ones_like(model.head.norm.weight))


def test_a_run_may_begin_with_another_runs_head(tmp_path, whole):
    first = load_head(whole)
    run(tmp_path / "more", replace(SMALL, start_from=str(whole), lr=1e-9, warmup=0.0, epochs=1))
    more = load_head(tmp_path / "more" / "last")
    assert torch.equal(more.vocabulary.ids, first.vocabulary.ids)
    for name, weights in more.head.named_parameters():  # a learning rate of nothing leaves it where it began
        torch.testing.assert_close(weights, first.head.get_parameter(name), rtol=1e-2, atol=1e-5)
    with pytest.raises(TercelError, match=r"feature_layers .*leave out --start-from"):
        run(tmp_path / "other", replace(SMALL, start_from=str(whole), feature_layers=(1, 4, 5)))
    with pytest.raises(TercelError, match="there is no head"):
        run(tmp_path / "none", replace(SMALL, start_from=str(tmp_path / "nowhere")))
