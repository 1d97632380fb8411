"""Deliberate mistakes in a head's folder: each is caught by the check that is there for it."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch

from tercel.chat.arguments import with_arguments
from tercel.chat.identity import TemplateIdentity
from tercel.doctor.examine import examine, fits
from tercel.doctor.findings import CheckUp, Finding
from tercel.doctor.template_check import template_findings
from tercel.draft import DraftModel, DraftVocabulary, TrainingRecord, save_head
from tercel.draft.history import TemplateRecord
from tercel.interop.export import export_head
from tercel.interop.formats.read import read_head
from tercel.target_model.model import Target
from tercel.target_model.sources import Source
from tercel.target_model.stored import StoredTarget
from tests.draft.heads_for_tests import tiny_head
from tests.methods.heads import random_parts
from tests.overfit import World, edit_json, edit_tensors
from tests.tiny import CHATML, IM_END, VOCAB, tiny_model, tiny_tokenizer


def levels(report: CheckUp, check: str) -> set[str]:
    return {finding.level for finding in report.findings if finding.check == check}


def worst(report: CheckUp, check: str) -> Finding:
    order = ("problem", "warning", "note", "ok")
    return min((f for f in report.findings if f.check == check), key=lambda f: order.index(f.level))


def settings(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda config: config.update(values)


@pytest.fixture
def folder(world: World, tmp_path: Path) -> Path:
    return Path(shutil.copytree(world.head_folder, tmp_path / "head"))


def checked(world: World, folder: Path) -> CheckUp:
    return examine(read_head(folder), world.target)


def with_settings(model: DraftModel, **changes: Any) -> DraftModel:
    return replace(model, head=tiny_head(replace(model.head.config, **changes)))


def test_a_right_head_has_neither_problem_nor_warning(world: World, folder: Path) -> None:
    report = checked(world, folder)
    assert report.ok
    assert {finding.level for finding in report.findings} == {"ok", "note"}
    assert {"sizes", "tokenizer", "weights", "template", "rope", "positions", "embeddings"} <= {
        finding.check for finding in report.findings if finding.level == "ok"
    }
    assert all(finding.advice for finding in report.findings if finding.level not in ("ok", "note"))


# ------------------------------------------------------------------------------------- layers, norms, RoPE, limits


@pytest.mark.parametrize(
    ("layers", "level", "words"),
    [
        ((2, 4, 5), "ok", "2, 4, 5 of 8"),
        ((1, 3, 4), "warning", "output ids"),
        ((3, 5, 6), "warning", "input ids"),
        ((5, 4, 2), "warning", "ascend"),
        ((0, 2, 4, 5, 6), "note", "5 layers"),
        ((2, 4, 9), "problem", "layer 9"),
        ((8,), "ok", "the last hidden state"),
    ],
)
def test_layer_ids(world: World, layers: tuple[int, ...], level: str, words: str) -> None:
    depth = 8 if layers == (8,) else None
    read = with_settings(world.head, feature_layers=layers, target_num_layers=depth)
    model = replace(read, format="sglang", path=None)
    found = worst(examine(model, world.target), "feature layers")
    assert (found.level, words in found.found) == (level, True), found


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_heads_whose_files_name_no_layers(world: World, tmp_path: Path, kind: str) -> None:
    save_head(random_parts(kind, world.target), tmp_path / "head")
    assert levels(checked(world, tmp_path / "head"), "feature layers") == {"ok"}


@pytest.mark.parametrize("layers", [(2, 4, 5), (0, 3, 6), (8,)])
def test_config_that_names_the_heads_own_layers(world: World, tmp_path: Path, layers: tuple[int, ...]) -> None:
    """In the words of every engine at once, or in an export in those of one; what engines take where it names none
    contradicts a head of other layers."""
    model = with_settings(world.head, feature_layers=layers, target_num_layers=8)
    own = tmp_path / "own"
    save_head(model, own)
    folders = [own]
    for engine in ("vllm", "sglang") if layers != (8,) else ():
        folders.append(tmp_path / engine)
        export_head(read_head(own), engine, folders[-1], StoredTarget.find(str(world.folder), ask_hub=False))
    for folder in folders:
        assert levels(checked(world, folder), "feature layers") == {"ok"}
    edit_json(own / "config.json", settings(eagle_config=None, eagle_aux_hidden_state_layer_ids=None))
    found = worst(checked(world, own), "feature layers")
    assert (found.level == "problem") == (layers != (2, 4, 5))
    edit_json(own / "config.json", settings(eagle_aux_hidden_state_layer_ids=[i - 1 for i in layers]))
    assert worst(checked(world, own), "feature layers").level == "problem"


def test_config_that_contradicts_the_head(world: World, folder: Path) -> None:
    edit_json(folder / "config.json", settings(eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}))
    edit_json(folder / "config.json", settings(norm_before_residual=True))
    report = checked(world, folder)
    assert "says 0, 2, 3, but the head works with 2, 4, 5" in worst(report, "feature layers").found
    assert "says true, but the head works with false" in worst(report, "norm_before_residual").found
    assert not report.ok


def test_norm_before_residual_left_unsaid(world: World, folder: Path) -> None:
    edit_json(folder / "config.json", lambda config: config.pop("norm_before_residual"))
    assert levels(checked(world, folder), "norm_before_residual") == {"note"}
    edit_json(folder / "config.json", settings(speculators_model_type="eagle3"))
    found = worst(checked(world, folder), "norm_before_residual")
    assert found.level == "warning"
    assert "vLLM then takes true" in found.found


@pytest.mark.parametrize("where", ["rope_theta", "rope_parameters"])
def test_another_rope_base_in_the_config(world: World, folder: Path, where: str) -> None:
    value: Any = 500_000.0 if where == "rope_theta" else {"rope_type": "default", "rope_theta": 500_000.0}
    edit_json(folder / "config.json", settings(**{where: value}))
    found = worst(checked(world, folder), "rope")
    assert found.level == "problem"
    assert "500000" in found.found
    assert "10000" in found.found


def test_another_rope_base_than_the_target(world: World) -> None:
    rope = {"rope_type": "default", "rope_theta": 500_000.0}
    found = worst(examine(replace(with_settings(world.head, rope_parameters=rope), path=None), world.target), "rope")
    assert found.level == "warning"
    assert "--probe" in found.advice


def test_a_position_limit_below_the_target(world: World, folder: Path) -> None:
    edit_json(folder / "config.json", settings(max_position_embeddings=64))
    found = worst(checked(world, folder), "positions")
    assert found.level == "problem"
    assert "64 positions" in found.found
    assert "256" in found.found


def test_a_head_of_another_target(world: World) -> None:
    narrow = with_settings(world.head, target_num_layers=9, vocab_size=VOCAB + 8, draft_vocab_size=125)
    report = examine(replace(narrow, path=None), world.target)
    found = " ".join(f.found for f in report.findings if f.check == "sizes")
    assert "9 layers" in found
    assert "136 tokens" in found
    assert not fits(narrow, world.target)
    assert fits(world.head, world.target)


# --------------------------------------------------------------------------------------- tokenizer and chat template


def test_the_tokenizer_of_another_target(world: World, folder: Path) -> None:
    other = Target(world.target.model, tiny_tokenizer(last_merge="o l"), world.target.source)
    report = examine(read_head(folder), other)
    assert levels(report, "tokenizer") == {"problem"}
    tiny_tokenizer(last_merge="o l").save_pretrained(folder)
    assert levels(checked(world, folder), "head's tokenizer") == {"problem"}
    tiny_tokenizer(CHATML.replace("system", "sys") + " ").save_pretrained(folder)
    assert levels(checked(world, folder), "head's tokenizer") == {"warning"}
    tiny_tokenizer().save_pretrained(folder)
    assert levels(checked(world, folder), "head's tokenizer") == {"ok"}


def templates(now: str, trained: str | None = None) -> dict[str, Finding]:
    record = None if trained is None else recorded(tiny_tokenizer(trained))
    findings = template_findings(tiny_tokenizer(now), TrainingRecord(chat_template=record), None)
    return {finding.check: finding for finding in findings}


def recorded(tokenizer, arguments: dict[str, Any] | None = None) -> TemplateRecord:
    return TemplateRecord(**vars(TemplateIdentity.of(tokenizer)), arguments=arguments)


PROMPT = "{{ '<|im_start|>assistant\n' }}"
THINKING = CHATML.replace(
    PROMPT, PROMPT + "{% if enable_thinking is defined and not enable_thinking %}{{ 'no thoughts\n' }}{% endif %}"
)
DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nyou are a kind bird<|im_end|>\n' }}{% endif %}"
    + CHATML
)


def test_the_template_of_training() -> None:
    assert templates(CHATML)["training template"].level == "note"
    assert templates(CHATML, CHATML)["training template"].level == "ok"
    edited = "{# edited #}" + CHATML
    assert templates(edited, CHATML)["training template"].level == "note"
    assert templates(DEFAULT_SYSTEM, CHATML)["training template"].level == "problem"


def test_the_template_arguments_of_training() -> None:
    told, plain = with_arguments(tiny_tokenizer(THINKING), {"enable_thinking": False}), tiny_tokenizer(THINKING)
    quiet = recorded(told, {"enable_thinking": False})

    def found(tokenizer, record: TemplateRecord) -> Finding:
        findings = template_findings(tokenizer, TrainingRecord(chat_template=record), None)
        return next(finding for finding in findings if finding.check == "training template")

    assert found(told, quiet).level == "ok"
    assert found(plain, quiet).level == "problem"
    assert 'chat_template_kwargs {"enable_thinking": false}' in found(plain, quiet).advice
    thinking = recorded(plain)
    assert found(plain, thinking).level == "ok"
    assert "without the template arguments that are given now" in found(told, thinking).found
    assert found(plain, recorded(plain, {"eos_token": "x"})).level == "ok"


def test_a_template_that_writes_empty_thoughts_is_no_problem() -> None:
    tokenizer = tiny_tokenizer(
        "{% for message in messages %}{% if message.role == 'assistant' %}<|im_start|>assistant\n"
        "<t>{{ message.reasoning_content or '' }}</t>{{ message.content }}<|im_end|>\n"
        "{% else %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    assert next(f for f in template_findings(tokenizer, TrainingRecord(), None) if f.check == "template").level == "ok"


def test_what_a_template_adds_by_itself() -> None:
    assert set(templates(CHATML)) == {"template", "training template"}
    thinking = templates(THINKING)["thinking"]
    assert thinking.level == "warning"
    assert "enable_thinking" in thinking.found
    assert "on unless" in thinking.found
    system = templates(DEFAULT_SYSTEM)["system prompt"]
    assert "(you are a kind bird)" in system.found


def test_the_date_that_training_saw() -> None:
    tokenizer = tiny_tokenizer("{{ strftime_now('%Y') }}" + CHATML)
    cases = {"2001-02-03T04:05:06": "note", datetime.now().isoformat(): "ok", "once": "note", None: "note"}
    for moment, level in cases.items():
        training = TrainingRecord(rendered_at=moment)
        found = next(f for f in template_findings(tokenizer, training, None) if f.check == "date")
        assert found.level == level, found
        assert ("training saw 2001-02-03, serving shows today's" in found.found) is (moment == "2001-02-03T04:05:06")
        assert ("to pin it" in found.advice) is (level == "note")


def test_templates_are_told_apart_on_any_day() -> None:
    dated = "{{ strftime_now('%f') }}" + CHATML
    assert templates(dated, dated)["training template"].level == "ok"
    assert templates("{# edited #}" + dated, dated)["training template"].level == "note"


def test_a_template_whose_training_text_is_unlike_serving() -> None:
    only_serving = CHATML.replace(PROMPT, "{{ '<|im_start|>model\n' }}")
    found = templates(only_serving)["template"]
    assert found.level == "problem"
    assert "unlike" in found.found


def test_a_template_that_cannot_be_used_is_found_once() -> None:
    (found,) = template_findings(tiny_tokenizer("{{ raise_exception('no') }}"), TrainingRecord(), None)
    assert (found.check, found.level) == ("template", "problem")
    assert "cannot be used: the chat template of" in found.found


def test_a_target_without_a_template() -> None:
    (found,) = template_findings(tiny_tokenizer(None), TrainingRecord(), None)
    assert found.level == "note"


# --------------------------------------------------------------------------- vocabulary, embeddings, precision, quants


def test_the_end_of_turn_is_missing_from_the_draft_vocabulary(world: World, tmp_path: Path) -> None:
    ids = torch.arange(IM_END + 1, IM_END + 41)
    model = with_settings(world.head, draft_vocab_size=40)
    save_head(replace(model, vocabulary=DraftVocabulary(ids, VOCAB)), tmp_path / "head")
    found = worst(checked(world, tmp_path / "head"), "draft vocabulary")
    assert found.level == "warning"
    assert f"token {IM_END}" in found.found


def test_a_lost_map_and_low_coverage(world: World) -> None:
    model = replace(with_settings(world.head, draft_vocab_size=40), path=None)
    lost = replace(model, vocabulary=DraftVocabulary(torch.arange(40), VOCAB))
    assert "lost d2t" in worst(examine(lost, world.target), "draft vocabulary").found
    info = replace(model.info, training=TrainingRecord(draft_vocabulary_coverage=0.7))
    few = replace(model, vocabulary=DraftVocabulary(torch.arange(1, 41), VOCAB), info=info)
    assert "70.0%" in worst(examine(few, world.target), "draft vocabulary").found


def test_embeddings_of_its_own(world: World) -> None:
    model = replace(with_settings(world.head, own_embeddings=True), path=None)
    assert levels(examine(model, world.target), "embeddings") == {"problem"}  # drawn at random
    theirs = world.target.embed(torch.arange(VOCAB))
    with torch.no_grad():
        model.head.embed_tokens.weight.copy_(theirs)
        assert levels(examine(model, world.target), "embeddings") == {"ok"}
        model.head.embed_tokens.weight.add_(0.5 * theirs.std() * torch.randn_like(theirs))
    assert levels(examine(model, world.target), "embeddings") == {"note"}
    narrow = replace(with_settings(world.head, hidden_size=16), path=None)
    assert levels(examine(narrow, world.target), "embeddings") == {"problem"}
    with torch.no_grad():
        narrow.head.embed_tokens.weight.copy_(theirs @ torch.randn(32, 16, generator=torch.manual_seed(0)))
    assert levels(examine(narrow, world.target), "embeddings") == {"note"}


def test_half_precision(world: World, folder: Path) -> None:
    edit_tensors(
        folder / "model.safetensors", lambda t: t.update({k: v.half() for k, v in t.items() if v.is_floating_point()})
    )
    found = worst(checked(world, folder), "precision")
    assert found.level == "warning"
    assert "bfloat16" in found.advice


def test_half_precision_where_features_are_large(world: World, folder: Path) -> None:
    loud = copy.deepcopy(tiny_model("llama", initializer_range=0.25))
    loud.get_input_embeddings().weight.data.mul_(60_000)
    target = Target(loud, tiny_tokenizer(), Source("loud", "loud", "folder", None))
    edit_json(folder / "config.json", settings(torch_dtype="float16"))
    found = worst(examine(read_head(folder), target), "precision")
    assert found.level == "problem"
    assert "65,504" in found.found


def test_quantisation(world: World, folder: Path) -> None:
    edit_json(folder / "config.json", settings(quantization_config={"quant_method": "awq", "bits": 4}))
    assert worst(checked(world, folder), "quantisation").level == "problem"
    quantised = tiny_model("llama", initializer_range=0.25)
    quantised.config.quantization_config = {"quant_method": "awq"}
    target = Target(quantised, tiny_tokenizer(), Source("q", "q", "folder", None))
    found = worst(examine(world.head, target), "quantised target")
    assert found.level == "warning"
    assert "(awq)" in found.found
    gguf = Target(world.target.model, tiny_tokenizer(), Source("g", "g", "gguf", None))
    assert worst(examine(world.head, gguf), "quantised target").level == "note"
