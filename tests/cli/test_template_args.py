"""`--template-arg`: the same prompts from every verb, and a record of it wherever a result is kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import write_prompts
from tests.cli.running import refused, run
from tests.tiny import CHATML, save_tiny, tiny_tokenizer

PROMPT = "{{ '<|im_start|>assistant\n' }}"
SWITCHED = CHATML.replace(PROMPT, PROMPT + "{% if style is defined %}{{ style + '\n' }}{% endif %}")
GIVEN = ["--template-arg", "style=in the rain"]
EXACT = ["--dtype", "float32"]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = save_tiny(tmp_path_factory.mktemp("switched"), "llama")
    tiny_tokenizer(SWITCHED).save_pretrained(folder)
    return str(folder)


def test_from_prompts_to_a_head_and_what_doctor_says_of_it(tmp_path: Path, target: str) -> None:
    answers, head = tmp_path / "answers.jsonl", tmp_path / "head"
    prompts = write_prompts(tmp_path / "prompts.jsonl", 10)
    asked = ["data", "regenerate", str(prompts), "--target", target, "--out", str(answers), "--max-new-tokens", "8"]
    assert run(*asked, *GIVEN, *EXACT).code == 0
    kept = json.loads((tmp_path / "answers.jsonl.settings.json").read_text("utf-8"))
    assert kept["template_arguments"] == {"style": "in the rain"}

    seen = run("data", "show", str(answers), "--target", target, *GIVEN)
    assert seen.code == 0
    assert "<|im_start|>assistant\nin the rain\n" in seen.out

    settings = tmp_path / "recipe.yaml"
    recipe = "max-steps: 2\nttt-steps: 2\ndraft-vocab: 64\neval-share: 0.3\n"
    settings.write_text(recipe + "template-arg: {style: in the rain}\n")
    train = ["train", target, "--data", str(answers), "--out", str(head), *EXACT]
    trained = run(*train, "--config", str(settings))
    assert trained.code == 0, trained.err
    record = json.loads((head / "tercel.json").read_text("utf-8"))["training"]["chat_template"]
    assert record["arguments"] == {"style": "in the rain"}
    settings.write_text(recipe)
    refused(run(*train, "--config", str(settings)), "holds a run with other settings, data or target")
    assert "steps already" in run(*train, "--config", str(settings), *GIVEN).out

    told = run("doctor", target, str(head), *GIVEN)
    assert "trained with exactly this template" in " ".join(told.out.split())
    without = run("doctor", target, str(head))
    assert without.code == 1
    assert '{"style": "in the rain"}, and here prompts are rendered otherwise' in " ".join(without.out.split())

    out = tmp_path / "bench.json"
    asked = ["bench", target, str(head), "--methods", "vanilla", "--max-new-tokens", "2"]
    measured = run(*asked, "--json", str(out), *GIVEN)
    assert measured.code == 0, measured.err
    assert json.loads(out.read_text("utf-8"))["template_arguments"] == {"style": "in the rain"}


def test_prompts_of_generate(tmp_path: Path, target: str) -> None:
    counts = []
    for given in ([], GIVEN):
        out = tmp_path / "out.json"
        asked = ["generate", target, "-p", "it is", "--draft", "none", "--max-new-tokens", "2"]
        ended = run(*asked, "--json", str(out), *given)
        assert ended.code == 0, ended.err
        counts.append(json.loads(out.read_text("utf-8"))["prompt_tokens"])
    assert counts[1] - counts[0] == len(tiny_tokenizer()("in the rain\n")["input_ids"])


def test_mistakes(target: str) -> None:
    asked = ("generate", target, "-p", "it is", "--draft", "none")
    refused(run(*asked, "--template-arg", "stile=x"), "reads no argument stile; did you mean style?")
    refused(run(*asked, "--template-arg", "style"), "--template-arg 'style' is not NAME=VALUE")
    refused(run("chat", target, "--draft", "none", "--template-arg", "style=True"), "write true, as in JSON")
