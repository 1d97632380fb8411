"""MTP through the command line: with a target's own modules, and with a head that was trained for one without."""

from __future__ import annotations

import json
from pathlib import Path

from tercel.cli.entrants import names_asked
from tercel.cli.options import DraftOptions
from tests.cli.conftest import RECIPE, World, world  # noqa: F401  (a fixture)
from tests.cli.running import refused, run
from tests.methods.mtp_worlds import save_with_modules

FEW = ["--max-new-tokens", "8", "--dtype", "float32", "--tree", "2x3x6"]


def test_a_targets_own_modules_are_measured(tmp_path: Path, world: World) -> None:  # noqa: F811
    path = str(save_with_modules(tmp_path, "deepseek_v3", num_nextn_predict_layers=2))
    out = tmp_path / "bench.json"
    asked = ["--tasks", f"{world.prompts}:2", *FEW, "--json", str(out)]
    done = run("bench", path, "--methods", "vanilla,mtp", *asked)
    assert done.code == 0, done.err
    assert json.loads(out.read_text())["tasks"]["prompts"]["mtp"]["identical"] == 1
    assert "announces 2 MTP modules (num_nextn_predict_layers), but its files hold 1" in done.err
    assert run("methods", path, "--json", str(out)).code == 0
    assert {row["name"]: row["ready"] for row in json.loads(out.read_text())["methods"]}["mtp"] == "yes"
    assert "mtp" in names_asked("all", path, None, DraftOptions())[0]
    assert "mtp" not in names_asked("all", world.target, None, DraftOptions())[0]


def test_one_is_trained_for_a_target_that_has_none(tmp_path: Path, world: World) -> None:  # noqa: F811
    head, out = str(tmp_path / "head"), tmp_path / "bench.json"
    asked = ["--tasks", f"{world.prompts}:2", *FEW, "--json", str(out)]
    refused(run("bench", world.target, "--methods", "vanilla,mtp", *asked), "comes without an MTP module; train one")
    asked_to = ["train", world.target, "--data", str(world.answers), *RECIPE, "--method", "mtp", "--max-steps", "4"]
    trained = run(*asked_to, "--out", head)
    assert trained.code == 0, trained.err
    done = run("bench", world.target, head, "--methods", "vanilla,mtp", *asked)
    assert done.code == 0, done.err
    assert json.loads(out.read_text())["tasks"]["prompts"]["mtp"]["identical"] == 1
    shown = run("inspect", head, "--target", world.target)
    assert shown.code == 0, shown.err
    assert "MTP (1 module, LlamaDecoderLayer)" in shown.out
    again = run(*asked_to, "--out", f"{head}-2", "--start-from", head)
    assert again.code == 0, again.err
