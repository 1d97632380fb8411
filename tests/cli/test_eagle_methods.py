"""A head of EAGLE from the command line: trained, inspected, measured in its trees, verified."""

from __future__ import annotations

import json
from pathlib import Path

from tercel.cli.entrants import names_asked
from tercel.cli.options import DraftOptions
from tests.cli.conftest import RECIPE, World
from tests.cli.running import refused, run

EXACT = ["--dtype", "float32"]


def test_a_head_of_hass_from_training_to_a_benchmark(tmp_path: Path, world: World) -> None:
    head = str(tmp_path / "head")
    asked = ["train", world.target, "--data", str(world.answers), "--out", head, *RECIPE]
    trained = run(*asked, "--method", "hass")
    assert trained.code == 0, trained.err
    refused(run(*asked, "--method", "eagle"), "holds a run with other settings")
    shown = run("inspect", head)
    assert shown.code == 0, shown.err
    assert "the last hidden state, after the final norm" in shown.out
    out = tmp_path / "bench.json"
    few = ["--tasks", f"{world.prompts}:2", "--max-new-tokens", "6", *EXACT, "--json", str(out)]
    names = ("eagle", "eagle2", "hass")
    done = run("bench", world.target, head, *few, "--methods", f"vanilla,{','.join(names)}")
    assert done.code == 0, done.err
    methods = json.loads(out.read_text())["tasks"]["prompts"]
    assert all(methods[name]["identical"] == 1 for name in names)
    found = names_asked("all", world.target, head, DraftOptions())[0]
    assert "hass" in found  # the record says how it learned
    assert not {"eagle", "eagle2", "eagle3"} & {*found}
    refused(run("bench", world.target, world.head, *few, "--methods", "vanilla,eagle"), "is a head of EAGLE-3")
    card = (tmp_path / "head" / "README.md").read_text("utf-8")
    assert "--draft hass" in card
    assert "Method `hass`" in card
    assert "tercel export" not in card
