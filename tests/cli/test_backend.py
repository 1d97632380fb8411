"""The target computed by something else than torch, as a user asks for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import World
from tests.cli.running import refused, run
from tests.tiny import save_tiny

pytest.importorskip("openvino", reason="openvino is not installed: pip install 'tercel[openvino]'")

ASKED = ["--prompt", "the cat sat", "--max-new-tokens", "12", "--dtype", "float32"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_openvino_gives_torchs_text_and_is_built_once(world: World) -> None:
    torch = run("generate", world.target, world.head, *ASKED, "--backend", "torch")
    first, again = (run("generate", world.target, world.head, *ASKED, "--backend", "openvino") for _ in range(2))
    assert (first.code, again.code) == (0, 0)
    assert first.out == again.out == torch.out
    assert [line.split("'s ")[-1] for line in first.err.splitlines()] == [
        "layers, giving inputs of [2, 4, 5], once",
        "output layer, once",
    ]
    assert again.err == torch.err == ""


def test_verify_proves_it(world: World) -> None:
    few = ["--tasks", f"{world.prompts}:2", "--max-new-tokens", "8", "--samples", "200", "--sampled-prompts", "1"]
    done = run("verify", world.target, world.head, *few, "--backend", "openvino", "--dtype", "float32")
    assert done.code == 0, done.err


def test_verify_with_int8_weights_is_against_the_quantised_model(world: World, tmp_path: Path) -> None:
    few = ["--tasks", f"{world.prompts}:2", "--max-new-tokens", "8", "--check", "greedy", "--dtype", "float32"]
    told = {}
    for backend in ("openvino", "torch"):
        out = tmp_path / f"{backend}.json"
        asked = [*few, "--backend", backend, "--weights", "int8", "--json", str(out)]
        done = run("verify", world.target, world.head, *asked)
        assert done.code == 0, done.err
        assert "beside the same model with the same int8 weights" in done.out
        assert "with its own weights, and here they are int8" in done.err
        assert "is another model, whose text may differ from its own" in done.err
        told[backend] = "torch computes it no faster" in done.err
        assert json.loads(out.read_text())["weights"] == "int8"
    assert told == {"openvino": False, "torch": True}


def test_a_model_that_openvino_cannot_compute_stays_with_torch(tmp_path: Path) -> None:
    target = str(save_tiny(tmp_path, "mamba"))
    done = run("generate", target, *ASKED, "--draft", "none", "--backend", "openvino")
    assert done.code == 0
    assert len(done.err.strip().splitlines()) == 1
    assert "is computed by torch: the backend openvino needs a model that can verify a tree" in done.err


def test_a_missing_package_is_told(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tercel.target_model.backends.find_spec", lambda name: None)
    refused(run("generate", world.target, *ASKED, "--backend", "openvino"), "pip install 'tercel[openvino]'")
