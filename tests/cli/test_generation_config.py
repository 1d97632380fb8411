"""Every verb that makes text follows the target's generation config, and says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.running import refused, run
from tests.tiny import save_tiny

ASKED = {"repetition_penalty": 1.8, "suppress_tokens": [40], "do_sample": True, "temperature": 0.6, "top_k": 9}
RAW = ("--prompt", "the cat sat on", "--raw", "--draft", "none", "--max-new-tokens", "12", "--dtype", "float32")


@pytest.fixture(scope="module")
def asking(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = save_tiny(tmp_path_factory.mktemp("asking"), "llama", num_hidden_layers=3)
    set_config(path, ASKED)
    return str(path)


def set_config(path: Path, asked: dict) -> None:
    file = path / "generation_config.json"
    kept = {name: value for name, value in json.loads(file.read_text()).items() if name.endswith("token_id")}
    file.write_text(json.dumps({**kept, **asked}))


def test_generate_follows_it_unless_told_not_to(asking: str) -> None:
    followed, plain = run("generate", asking, *RAW), run("generate", asking, *RAW, "--no-generation-config")
    assert followed.code == plain.code == 0
    assert followed.out != plain.out
    assert plain.err == ""
    taken, draws = followed.err.strip().splitlines()
    assert "repetition_penalty=1.8, suppress_tokens=(40,); --no-generation-config leaves that out" in taken
    assert "would draw tokens (temperature=0.6, top_k=9); this is greedy, and --sample draws as it says" in draws
    given = run("generate", asking, *RAW, "--repetition-penalty", "1.0", "--temperature", "0")
    assert "repetition_penalty" not in given.err
    assert "would draw" not in given.err
    drawn = run("generate", asking, *RAW, "--sample", "--seed", "1")
    assert "asks: temperature=0.6, top_k=9, repetition_penalty=1.8, suppress_tokens=(40,);" in drawn.err
    assert drawn.out != followed.out
    refused(run("generate", asking, *RAW, "--sample", "--temperature", "0"), "temperature 0 is greedy")


def test_bench_compares_the_same_text(asking: str, tmp_path: Path) -> None:
    for extra in ((), ("--no-generation-config",)):
        done = run(
            *("bench", asking, "--methods", "vanilla,transformers", "--tasks", "demo:2", "--max-new-tokens", "12"),
            *("--dtype", "float32", "--json", str(tmp_path / "bench.json"), *extra),
        )
        assert done.code == 0, done.err
        report = json.loads((tmp_path / "bench.json").read_text())
        assert report["tasks"]["demo"]["transformers"]["identical"] == 1.0
        assert report["settings"]["repetition_penalty"] == (1.0 if extra else 1.8)
        assert report["settings"]["rules"]["suppress_tokens"] == ([] if extra else [40])


def test_regenerate_follows_it_and_does_not_mix_it_with_another(asking: str, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text(json.dumps({"id": "a", "turns": ["the cat"]}) + "\n")
    command = ("data", "regenerate", str(prompts), "--target", asking, "--out", str(out), "--dtype", "float32")
    followed = run(*command, "--max-new-tokens", "8")
    assert followed.code == 0, followed.err
    assert "repetition_penalty=1.8" in followed.err
    first = out.read_bytes()
    out.rename(tmp_path / "answers.jsonl.part")  # as if stopped
    refused(run(*command, "--max-new-tokens", "8", "--no-generation-config"), "was begun with sampling")
    (tmp_path / "answers.jsonl.part").unlink()
    assert run(*command, "--max-new-tokens", "8", "--no-generation-config").code == 0
    assert out.read_bytes() != first


def test_a_config_that_means_nothing_is_refused_in_one_sentence(tmp_path: Path) -> None:
    path = save_tiny(tmp_path, "llama", num_hidden_layers=3)
    set_config(path, {"suppress_tokens": "none"})
    refused(run("generate", str(path), *RAW), "the generation config of", "suppress_tokens", "--no-generation-config")
    assert run("generate", str(path), *RAW, "--no-generation-config").code == 0
