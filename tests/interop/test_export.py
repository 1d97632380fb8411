"""Exports: every engine with every option it has, proven; what it lacks refused; whole folders or none."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from typer.testing import CliRunner

from tercel.cli.export import command
from tercel.draft import DraftVocabulary, HeadInfo, TrainingRecord, save_head
from tercel.errors import TercelError
from tercel.interop import export as export_module
from tercel.interop.engines import ENGINES, find, sglang
from tercel.interop.engines.limits import check_expressible
from tercel.interop.engines.vllm import Vllm
from tercel.interop.formats.read import read_head
from tercel.locks import folder_lock
from tercel.target_model.stored import StoredTarget
from tests.interop.export_worlds import DEPTH, LLAMA3, NAMED, draft, export
from tests.tiny import VOCAB, save_tiny, save_tiny_gguf

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "attention_bias": {"attention_bias": True},
    "own_embeddings": {"own_embeddings": True},
    "narrower": {"target_hidden_size": 24},
    "unpruned": {"draft_vocab_size": VOCAB},
    "two layers": {"feature_layers": (1, 6)},
    "five layers": {"feature_layers": (1, 2, 4, 5, 7)},
    "default layers": {"feature_layers": (2, 4, 5)},
    "layer 0": {"feature_layers": (0, 3, 6)},
    "order": {"feature_layers": (3, 2, 6)},
    "deep": {"num_decoder_layers": 3},
    "llama3": {"rope_parameters": LLAMA3},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}},
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 5000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        }
    },
}
REFUSED = {
    ("vllm", "order"),
    ("speculators", "order"),
    ("speculators", "narrower"),
    *(("sglang", name) for name in ("norm_before_residual", "attention_bias", "own_embeddings", "order")),
    *(("trtllm", name) for name in ("norm_before_residual", "own_embeddings", "order", "layer 0")),
    *(
        ("openvino", name)
        for name in OPTIONS
        if name not in ("plain", "unpruned", "default layers", "llama3", "linear", "yarn")
    ),
    *((engine, "deep") for engine in ("sglang", "trtllm", "llamacpp")),
    *(("llamacpp", name) for name in ("fc_norm", "norm_output", "attention_bias", "two layers", "five layers", "yarn")),
}


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("target") / "target.gguf"
    save_tiny_gguf(file)
    return file


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_gets_the_head_or_a_reason(engine: str, name: str, gguf: Path, tmp_path: Path) -> None:
    model, out = draft(**OPTIONS[name]), tmp_path / "out"
    if (engine, name) in REFUSED:
        with pytest.raises(TercelError):
            export(model, engine, out, gguf)
        assert list(tmp_path.iterdir()) == []
        return
    report = export(model, engine, out, gguf)
    seen = find(engine).view(out, DEPTH)
    assert seen.layers == report.layers == model.head.config.feature_layers
    assert {check.name for check in report.checks} >= {"every tensor there once", "draft logits equal", "flags"}
    assert {name for name, on in seen.flags.items() if on} == {
        flag for flag in seen.flags if getattr(model.head.config, flag)
    }
    assert "tercel doctor" in (out / "README.md").read_text()
    assert report.command in (out / "README.md").read_text()
    json.dumps(report.to_json())


@pytest.mark.parametrize("engine", ENGINES)
def test_a_check_is_proposed_where_the_engines_server_can_be_asked(engine: str, gguf: Path, tmp_path: Path) -> None:
    export(draft(feature_layers=(2, 4, 5)), engine, tmp_path / "out", gguf)
    text = (tmp_path / "out" / "README.md").read_text()
    ports = {"vllm": 8000, "speculators": 8000, "sglang": 30000, "llamacpp": 8080}
    assert (f"--url http://localhost:{ports.get(engine)}" in text) == (engine in ports)
    assert ("--url" in text) == ("server's counters" in text) == (engine in ports)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_head_of_the_proposed_check_can_be_read(engine: str, gguf: Path, tmp_path: Path) -> None:
    save_head(draft(feature_layers=(2, 4, 5)), tmp_path / "head")
    export(read_head(tmp_path / "head"), engine, tmp_path / "out", gguf)
    text = (tmp_path / "out" / "README.md").read_text()
    line = next(line for line in text.splitlines() if line.startswith("tercel doctor"))
    assert read_head(Path(shlex.split(line)[3])).vocabulary.pruned


@pytest.mark.parametrize(
    ("engine", "name", "parts"),
    [
        ("sglang", "norm_before_residual", ("SGLang has no norm_before_residual", "export it to vllm or speculators")),
        ("sglang", "own_embeddings", ("the target's embeddings in place", "vllm")),
        ("trtllm", "layer 0", ("outputs of layers", "layer 1 or later")),
        ("openvino", "five layers", ("exactly three layers", "takes 5 (1, 2, 4, 5, 7)")),
        ("openvino", "narrower", ("another width (16)", "(24)", "vllm or sglang")),
        ("openvino", "fc_norm", ("OpenVINO has no fc_norm",)),
        ("llamacpp", "two layers", ("exactly three layers", "takes 2")),
        ("llamacpp", "norm_output", ("llama.cpp has no norm_output",)),
        ("llamacpp", "yarn", ("RoPE scaling 'yarn'",)),
        ("speculators", "narrower", ("another width", "vllm")),
        ("vllm", "order", ("own order", "3, 2, 6", "llamacpp")),
        ("sglang", "deep", ("one decoder layer, and this one has 3", "vllm or speculators", "head-layers 1")),
    ],
)
def test_refusals_name_the_reason_and_the_nearest_setting(
    engine: str, name: str, parts: tuple[str, ...], gguf: Path, tmp_path: Path
) -> None:
    with pytest.raises(TercelError) as refused:
        export(draft(**OPTIONS[name]), engine, tmp_path / "out", gguf)
    for part in parts:
        assert part in str(refused.value)


def test_features_as_wide_as_the_head_lose_their_fc() -> None:
    model = draft(hidden_size=48, target_hidden_size=16)
    for engine in ("sglang", "trtllm"):
        with pytest.raises(TercelError, match="leaves fc out"):
            check_expressible(find(engine), model.head.config, model.vocabulary)
    with pytest.raises(TercelError, match="no fc for a single"):
        check_expressible(find("trtllm"), draft(feature_layers=(4,)).head.config, model.vocabulary)


def test_a_whole_vocabulary_in_another_order_is_refused(tmp_path: Path) -> None:
    model = draft(draft_vocab_size=VOCAB)
    shuffled = replace(model, vocabulary=DraftVocabulary(torch.arange(VOCAB).flip(0), VOCAB))
    with pytest.raises(TercelError, match="another order"):
        export(shuffled, "vllm", tmp_path / "out")


def test_sglang_reads_ids_by_the_family_of_the_target(tmp_path: Path) -> None:
    other, usual = draft(feature_layers=(3, 4, 6)), draft()
    assert "differ on ids" in export(other, "sglang", tmp_path / "a").warnings[0]
    assert export(usual, "sglang", tmp_path / "b", target={"model_type": "deepseek_v3"}).warnings == ()
    with pytest.raises(TercelError, match="only if the first one is 1"):
        export(other, "sglang", tmp_path / "c", target={"model_type": "deepseek_v3"})


def test_a_family_that_the_writer_forgot_is_found_by_the_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writer and reader keep lists of their own; from one list, one mistake would fool both."""
    monkeypatch.setattr(sglang, "_NOT_OUTPUTS", ())
    with pytest.raises(TercelError, match="would capture the inputs of layers 2, 3, 5"):
        export(draft(feature_layers=(3, 4, 6)), "sglang", tmp_path / "out", target={"model_type": "deepseek_v3"})
    assert not (tmp_path / "out").exists()


@settings(max_examples=12, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("engine", [e for e in ENGINES if e != "llamacpp"])
def test_any_layers_come_back_as_they_were(engine: str, data: st.DataObject, tmp_path_factory: Any) -> None:
    depth = data.draw(st.integers(6, 40))
    layers = tuple(sorted(data.draw(st.sets(st.integers(0, depth - 1), min_size=3, max_size=3))))
    model = draft(feature_layers=layers, target_num_layers=depth)
    out = tmp_path_factory.mktemp("ids") / "out"
    target = {"num_hidden_layers": depth}
    if engine in ("trtllm", "openvino") and layers[0] == 0:
        with pytest.raises(TercelError, match="layer 0"):
            export(model, engine, out, target=target)
        return
    report = export(model, engine, out, target=target)
    assert find(engine).view(out, depth).layers == layers
    offset = 1 if report.ids_mean == "outputs of layers" else 0
    assert report.written_ids == find(engine).ids(layers) == tuple(i - offset for i in layers)


def test_every_format_has_the_ids_in_its_own_place(gguf: Path, tmp_path: Path) -> None:
    model = draft()
    for engine in ENGINES:
        export(model, engine, tmp_path / engine, gguf)
    config = {e: json.loads((tmp_path / e / "config.json").read_text()) for e in ENGINES if e != "llamacpp"}
    assert config["vllm"]["eagle_aux_hidden_state_layer_ids"] == [2, 3, 6]
    assert config["vllm"]["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [2, 3, 6]
    assert config["sglang"]["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 2, 5]
    assert config["speculators"]["eagle_aux_hidden_state_layer_ids"] == [2, 3, 6]
    options = yaml.safe_load((tmp_path / "trtllm" / "trtllm.yaml").read_text())["speculative_config"]
    assert options["eagle3_layers_to_capture"] == [1, 2, 5]
    assert json.loads((tmp_path / "openvino" / "openvino.json").read_text()) == {"hidden_layers_list": [1, 2, 5]}
    for engine in ("vllm", "sglang", "trtllm", "openvino"):
        for flag in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
            assert config[engine][flag] is False


def test_weights_keep_their_values_in_the_smallest_type(tmp_path: Path) -> None:
    wide = draft()
    assert export(wide, "vllm", tmp_path / "wide").dtype == "float32"
    narrow = draft()
    narrow.head.to(torch.bfloat16)
    assert export(narrow, "vllm", tmp_path / "narrow").dtype == "bfloat16"
    with safe_open(tmp_path / "narrow" / "model.safetensors", framework="pt") as stored:
        assert torch.equal(stored.get_tensor("fc.weight"), narrow.head.fc.weight)


def test_no_embeddings_but_the_heads_own(tmp_path: Path) -> None:
    for engine, own in (("vllm", False), ("vllm", True), ("speculators", False)):
        out = tmp_path / f"{engine}{own}"
        export(draft(own_embeddings=own), engine, out)
        with safe_open(out / "model.safetensors", framework="pt") as stored:
            assert ("embed_tokens.weight" in stored.keys()) == own  # noqa: SIM118


@pytest.mark.parametrize("learned", [True, False])
def test_speculators_is_told_whether_embeddings_learn(learned: bool, tmp_path: Path) -> None:
    model = draft(own_embeddings=True)
    training = TrainingRecord(embeddings="trained" if learned else "frozen")
    model = replace(model, info=replace(model.info, training=training))
    export(model, "speculators", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["embed_requires_grad"] is learned
    assert read_head(tmp_path / "out").info.training.embeddings == training.embeddings


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm", "openvino"])
def test_an_export_is_read_back_exactly(engine: str, tmp_path: Path) -> None:
    model = draft()
    export(model, engine, tmp_path / "out")
    back = read_head(tmp_path / "out")
    assert (back.head.config, back.info) == (model.head.config, model.info)
    assert torch.equal(back.vocabulary.ids, model.vocabulary.ids)
    for name, parameter in model.head.named_parameters():
        assert torch.equal(parameter, back.head.get_parameter(name)), name


def test_a_speculators_folder_is_read_back_as_one(tmp_path: Path) -> None:
    model = draft(norm_before_residual=True)
    export(model, "speculators", tmp_path / "out")
    back = read_head(tmp_path / "out", num_layers=DEPTH)
    assert back.format == "speculators"
    assert back.head.config.feature_layers == (2, 3, 6)
    assert back.head.config.norm_before_residual
    assert torch.equal(back.head.fc.weight, model.head.fc.weight)


def test_a_failed_proof_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"

    def shifted(*arguments: Any) -> dict[str, Any]:
        config = real(*arguments)
        config["rms_norm_eps"] = 1e-3
        return config

    real = Vllm.config
    monkeypatch.setattr(Vllm, "config", shifted)
    with pytest.raises(TercelError, match="epsilon"):
        export(draft(), "vllm", out)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    export(draft(), "vllm", out)
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    monkeypatch.setattr(Vllm, "config", shifted)
    with pytest.raises(TercelError, match="epsilon"):
        export(draft(), "vllm", out, overwrite=True)
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_a_place_is_taken_only_where_an_export_was(tmp_path: Path) -> None:
    out, model = tmp_path / "out", draft()
    export(model, "vllm", out)
    with pytest.raises(TercelError, match="overwrite"):
        export(model, "sglang", out)
    (out / "thesis.txt").write_text("mine")
    export(model, "trtllm", out, overwrite=True)
    assert (out / "trtllm.yaml").is_file()
    export(model, "sglang", out, overwrite=True)
    assert find("sglang").view(out, DEPTH).layers == (2, 3, 6)
    assert not (out / "trtllm.yaml").exists()  # of the export before
    assert (out / "thesis.txt").read_text() == "mine"
    with pytest.raises(TercelError, match="own folder"):
        export(replace(model, path=out), "vllm", out, overwrite=True)
    (out / "README.md").write_text("my own words")
    with pytest.raises(TercelError, match=r"README\.md in .* was edited"):
        export(model, "vllm", out, overwrite=True)
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(TercelError, match="is a file"):
        export(model, "vllm", file, overwrite=True)


def test_heads_and_other_folders_are_never_overwritten(tmp_path: Path) -> None:
    """A head, the same without its hidden file (as an earlier version's exports), and a folder of something else."""
    head, bare, other = tmp_path / "head", tmp_path / "bare", tmp_path / "other"
    save_head(draft(), head, card="# A card\n")
    save_head(draft(), bare, card="# A card\n")
    (bare / ".tercel-files.json").unlink()
    other.mkdir()
    (other / "config.json").write_text("{}")
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    for out in (head, bare, other):
        with pytest.raises(TercelError, match="holds other things than an export"):
            export(draft(), "vllm", out, overwrite=True)
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before
    export(draft(), "vllm", tmp_path / "export")
    with pytest.raises(TercelError, match=r"holds other output of tercel \(export\)"):
        save_head(draft(), tmp_path / "export")


def test_only_one_process_exports_into_a_folder(tmp_path: Path) -> None:
    with folder_lock(tmp_path / "out"), pytest.raises(TercelError, match="is being written by another process"):
        export(draft(), "vllm", tmp_path / "out")


def test_a_head_that_does_not_know_its_target_needs_one(tmp_path: Path) -> None:
    model = draft(feature_layers=(), target_num_layers=None)
    with pytest.raises(TercelError, match="give the target"):
        export_module.export_head(model, "vllm", tmp_path / "a", StoredTarget(NAMED, None))
    report = export(model, "vllm", tmp_path / "b")
    assert report.layers == (2, 4, 5)
    with pytest.raises(TercelError, match="layers"):
        export(draft(), "vllm", tmp_path / "c", target={"num_hidden_layers": DEPTH + 1})
    with pytest.raises(TercelError, match="vocabulary of 128 tokens, but org/tiny has 300"):
        export(draft(), "vllm", tmp_path / "d", target={"vocab_size": 300})
    with pytest.raises(TercelError, match="no engine 'tgi'"):
        export(draft(), "tgi", tmp_path / "d")


def test_the_command_line_writes_proves_and_prints(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(command)
    target, head, out = save_tiny(tmp_path, "llama"), tmp_path / "head", tmp_path / "out"
    depth = json.loads((target / "config.json").read_text())["num_hidden_layers"]
    model = draft(feature_layers=(0, 1, depth - 1), target_num_layers=depth, target_hidden_size=32)
    model = replace(model, info=HeadInfo(None))
    save_head(model, head, dtype=torch.float32)
    arguments = [str(head), "--to", "vllm", "--out", str(out), "--target", str(target)]
    ended = CliRunner().invoke(app, [*arguments, "--json", str(tmp_path / "r.json")], catch_exceptions=False)
    assert ended.exit_code == 0, ended.output
    assert f"0, 1, {depth - 1} (inputs of layers)" in ended.output
    assert "✓ 4 steps over 12 rows" in ended.output
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["command"] in ended.output
    assert report["target"] == str(target)
    with pytest.raises(TercelError, match="overwrite"):
        CliRunner().invoke(app, arguments, catch_exceptions=False)
    with pytest.raises(TercelError, match="give the target as FILE"):
        CliRunner().invoke(app, [*arguments[:2], "llamacpp", *arguments[3:], "--overwrite"], catch_exceptions=False)
    assert find("vllm").view(out, depth).layers == (0, 1, depth - 1)
