"""The target that a head records: whoever asks for it finds the same one."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from tercel.draft import HeadInfo, TargetIdentity, TrainingRecord, save_head
from tercel.interop.served_target import read_beside
from tests.cli.running import Ended, refused, run
from tests.decode.drafts import random_draft, tiny_target
from tests.interop.foreign import write_speculators
from tests.tiny import save_tiny


def asked(head: Path, out: Path, *more: str) -> dict[str, Ended]:
    """`export` and `serve-command` for the same folder."""
    out.mkdir()
    return {
        "export": run("export", str(head), "--to", "vllm", "--out", str(out / "a"), "--json", f"{out}/1.json", *more),
        "serve-command": run("serve-command", str(head), "--engine", "vllm", "--json", f"{out}/2.json", *more),
    }


def named(folder: Path, target: str) -> Path:
    return write_speculators(random_draft(tiny_target("llama")), folder, speculators_config=verifier(target))


def verifier(target: str) -> dict[str, object]:
    return {"algorithm": "eagle3", "verifier": {"name_or_path": target}}


def test_a_head_of_another_maker_names_its_target_for_both(tmp_path: Path) -> None:
    target = save_tiny(tmp_path, "llama")
    model, served = read_beside(named(tmp_path / "head", str(target)), None, ask_hub=False)
    assert model.info.target is None
    assert (served.address, served.num_layers, served.model_type) == (str(target), 8, "llama")
    for verb, ended in asked(tmp_path / "head", tmp_path / "out").items():
        assert ended.code == 0, (verb, ended.err)
    told = [json.loads(file.read_text("utf-8")) for file in sorted((tmp_path / "out").glob("*.json"))]
    assert [one["target"] for one in told] == [str(target)] * 2


def test_a_target_that_is_gone_is_missed_by_both(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    head = named(tmp_path / "head", str(gone))
    said = {refused(ended) for ended in asked(head, tmp_path / "out").values()}
    assert len(said) == 1
    assert f"the target that the head records is not to be had (there is no folder or file {gone}" in said.pop()
    given = {refused(ended) for ended in asked(head, tmp_path / "again", "--target", str(gone)).values()}
    assert len(given) == 1
    assert "records" not in given.pop()


def test_a_head_without_a_record_asks_for_its_target(tmp_path: Path) -> None:
    save_head(random_draft(tiny_target("llama")), tmp_path / "head", dtype=torch.float32)
    for ended in asked(tmp_path / "head", tmp_path / "out").values():
        assert refused(ended) == "error: the head does not record its target; give the target"


def test_the_identity_of_training_goes_before_a_name() -> None:
    training = TrainingRecord(target_name="by-name")
    both = HeadInfo(TargetIdentity("by-identity", "w", "t"), training)
    assert both.target_name == "by-identity"
    assert HeadInfo(None, training).target_name == "by-name"
    assert HeadInfo(None).target_name is None
