"""Names become models; whatever is wrong with a name or a folder is told in one sentence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from tercel.errors import TercelError
from tercel.target_model import sources
from tercel.target_model.sources import (
    Source,
    check_device,
    load_causal_lm,
    load_config,
    load_tokenizer,
    parse_dtype,
    resolve,
)
from tests.tiny import IM_END, VOCAB, save_tiny, save_tiny_gguf, tiny_model, tiny_tokenizer

TOKENS = torch.arange(4, 34)[None]
Edit = Callable[[Path], object]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    if request.node.get_closest_marker("real") is None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tercel"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("whole"), "llama")


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy that a test may break."""
    return shutil.copytree(whole, tmp_path / "model")


def load(name: object, **settings: Any) -> Any:
    return load_causal_lm(str(name), torch.float32, "cpu", **settings)


def with_config(**settings: Any) -> Edit:
    def edit(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **settings}))

    return edit


def with_weights(change: Callable[[dict[str, torch.Tensor]], Any]) -> Edit:
    def edit(folder: Path) -> None:
        weights = {name: weight.clone() for name, weight in load_file(folder / "model.safetensors").items()}
        change(weights)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    return edit


def without(*names: str) -> Edit:
    def edit(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return edit


def cut_weights(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


# -- what works


def test_folder_loads_as_saved(whole: Path) -> None:
    model = load(whole)
    assert torch.equal(model(TOKENS).logits, tiny_model("llama")(TOKENS).logits)
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert resolve(str(whole)) == Source(str(whole), str(whole), "folder", None)
    assert load_config(str(whole)).num_hidden_layers == 8
    assert load_tokenizer(str(whole)).encode("the 42 cats") == tiny_tokenizer().encode("the 42 cats")


def test_dtype_and_attention_are_used(whole: Path) -> None:
    model = load_causal_lm(str(whole), torch.bfloat16, "cpu", "eager")
    assert model.dtype == torch.bfloat16
    assert model.config._attn_implementation == "eager"


def test_gguf_is_converted_once(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = save_tiny_gguf(tmp_path / "tiny.gguf")
    model = load(tmp_path / "tiny.gguf")
    assert torch.equal(model(TOKENS).logits, original(TOKENS).logits)
    source = resolve(str(tmp_path / "tiny.gguf"))
    assert source.kind == "gguf"
    assert Path(source.path).is_relative_to(cache)
    monkeypatch.setattr(sources, "convert_gguf", None)  # a second conversion would fail
    assert load_tokenizer(str(tmp_path / "tiny.gguf")).eos_token_id == IM_END
    save_tiny_gguf(tmp_path / "tiny.gguf", seed=1)  # another file under the same name
    with pytest.raises(TypeError):
        resolve(str(tmp_path / "tiny.gguf"))


def test_hub_names_are_taken_apart_without_network() -> None:
    assert resolve("owner/some-model") == Source("owner/some-model", "owner/some-model", "hub", None)
    assert resolve("o/m@v1.0") == Source("o/m@v1.0", "o/m", "hub", "v1.0")
    assert resolve("gpt2").kind == "hub"


def test_tokenizer_needs_no_config(folder: Path) -> None:
    without("config.json", "model.safetensors")(folder)
    assert len(load_tokenizer(str(folder))) == VOCAB


# -- what is refused

BROKEN: dict[str, tuple[Edit, str]] = {
    "no config": (without("config.json"), "has no config.json"),
    "config is no JSON": (lambda f: (f / "config.json").write_text("{"), "cannot be read as JSON"),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), "not an object"),
    "cut off": (cut_weights, r"model\.safetensors is damaged or cut off"),
    "no weights": (without("model.safetensors"), "has no model.safetensors"),
    "pickle": (pickled, "pickled weights are never read"),
    "missing": (
        with_weights(lambda w: w.pop("model.layers.3.mlp.up_proj.weight")),
        r"lacks 1 .* such as model\.layers\.3\.mlp\.up_proj\.weight",
    ),
    "all missing": (
        with_weights(lambda w: [w.pop(name) for name in list(w)] and w.update(x=torch.ones(1))),
        "they would be random",
    ),
    "shape": (
        with_weights(lambda w: w.update({"model.norm.weight": torch.ones(7)})),
        r"has model\.norm\.weight as \[7\] where its config\.json asks for \[32\]",
    ),
    "nan": (
        with_weights(lambda w: w["model.layers.2.mlp.up_proj.weight"][3, 4].fill_(float("nan"))),
        r"NaN or infinite values in model\.layers\.2\.mlp\.up_proj\.weight as float32",
    ),
    "infinite": (with_weights(lambda w: w["model.norm.weight"][0].fill_(torch.inf)), "infinite values"),
    "encoder": (
        with_config(model_type="bert", architectures=["BertForMaskedLM"]),
        "not a causal language model but BertForMaskedLM",
    ),
    "encoder-decoder": (
        with_config(model_type="t5", architectures=["T5ForConditionalGeneration"]),
        "not a causal language model but T5",
    ),
    "classifier": (
        with_config(architectures=["LlamaForSequenceClassification"]),
        "not a causal language model but LlamaForSequenceClassification",
    ),
    "vision": (with_config(model_type="clip", architectures=["CLIPModel"]), "not a causal language model"),
    "unknown": (with_config(model_type="new-thing"), "does not know the architecture .* update transformers"),
    "own code": (
        with_config(model_type="new-thing", auto_map={"AutoConfig": "configuration_new.NewConfig"}),
        "brings its own Python code.*trust-remote-code",
    ),
    "head by vocabulary": (with_config(draft_vocab_size=32), "holds a draft head"),
    "head by class": (with_config(architectures=["LlamaForCausalLMEagle3"]), "holds a draft head"),
    "own head": (lambda f: (f / "tercel.json").write_text("{}"), "holds a draft head"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_broken_folder_is_refused_in_one_sentence(folder: Path, fault: str) -> None:
    edit, message = BROKEN[fault]
    edit(folder)
    with pytest.raises(TercelError, match=message) as caught:
        load(folder)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


def test_overflow_in_float16_is_refused(folder: Path) -> None:
    with_weights(lambda w: w["model.norm.weight"][0].fill_(1e6))(folder)
    load(folder)
    with pytest.raises(TercelError, match=r"as float16.*use bfloat16 or float32"):
        load_causal_lm(str(folder), torch.float16, "cpu")


def test_folder_without_tokenizer_is_refused(folder: Path) -> None:
    without("tokenizer.json", "tokenizer_config.json")(folder)
    with pytest.raises(TercelError, match="holds no usable tokenizer"):
        load_tokenizer(str(folder))


@pytest.mark.parametrize("attention", ["flash_attention_2", "nonsense"])
def test_unavailable_attention_is_refused(whole: Path, attention: str) -> None:
    with pytest.raises(TercelError, match="use sdpa or eager"):
        load(whole, attn_implementation=attention)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smollm2-135", "did you mean the built-in smollm2-135m?"),
        ("qwen2.5-coder-0.5", "did you mean the built-in qwen2.5-coder-0.5b?"),
        ("./nothing-here", "cannot be a Hub id; give a model's folder"),
        ("/no/such/folder", "there is no folder or file /no/such/folder"),
        ("model.gguf", "there is no folder or file model.gguf"),
        ("three small words", "cannot be a Hub id"),
        ("", "name is empty"),
    ],
)
def test_name_that_is_nothing(name: str, message: str) -> None:
    with pytest.raises(TercelError) as caught:
        resolve(name)
    assert message in str(caught.value)


def test_other_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(TercelError, match=r"is a file but not a \.gguf"):
        resolve(str(tmp_path / "model.bin"))


def test_unreachable_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: object, **__: object) -> None:
        raise OSError("We couldn't connect") from LocalEntryNotFoundError("no network")

    monkeypatch.setattr(AutoConfig, "from_pretrained", offline)
    with pytest.raises(TercelError, match=r"Hub cannot be reached.*local folder.*smollm2-135m") as caught:
        load("owner/model")
    assert "configuration of owner/model" in str(caught.value)


def test_dtype_and_device_names() -> None:
    assert parse_dtype("bfloat16") == torch.bfloat16
    assert check_device("cpu") == torch.device("cpu")
    with pytest.raises(TercelError, match=r"'int8' is not a data type.*float32, bfloat16, float16"):
        parse_dtype("int8")
    for wrong in ("gpu", "meta"):
        with pytest.raises(TercelError, match="use cpu, cuda"):
            check_device(wrong)


def test_cuda_where_there_is_none(monkeypatch: pytest.MonkeyPatch, whole: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(TercelError, match="device cuda is asked for but PyTorch sees 0 CUDA devices"):
        load_causal_lm(str(whole), torch.float32, "cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert check_device("cuda:0") == torch.device("cuda:0")
    with pytest.raises(TercelError, match="cuda:1 is asked for but PyTorch sees 1"):
        check_device("cuda:1")


@pytest.mark.real
def test_real_default_target() -> None:
    tokenizer = load_tokenizer("smollm2-135m")
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("2024 is")) == ["2", "0", "2", "4", "Ġis"]
    assert tokenizer.encode("2024 is") == [34, 32, 34, 36, 314]
    model = load("smollm2-135m")
    assert (model.config.vocab_size, model.config.rope_parameters["rope_theta"]) == (49_152, 100_000)
    prompt = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
    tokens = tokenizer(text, return_tensors="pt").input_ids
    answer = model.generate(tokens, do_sample=False, max_new_tokens=12)[0, tokens.shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
