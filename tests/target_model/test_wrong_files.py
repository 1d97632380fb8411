"""Targets whose files are wrong or ask for much: one sentence, and nothing large is made."""

from __future__ import annotations

import json
import random
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import RemoteEntryNotFoundError
from safetensors.torch import load_file, save_file

from tercel import limits
from tercel.errors import TercelError
from tercel.reading import read_shards
from tercel.target_model import snapshot as snapshot_module
from tercel.target_model import sources
from tercel.target_model.gguf_header import check_header
from tercel.target_model.model import Target
from tercel.target_model.sources import load_causal_lm, load_config, load_tokenizer, resolve
from tests.tiny import save_tiny, save_tiny_gguf

COMMIT = "0123456789abcdef0123456789abcdef01234567"
WRONG = (None, True, 0, -1, 3 * 10**9, 10**39, 1.5, "x", "", [], [None], {"a": 1}, float("inf"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("whole"), "llama", num_hidden_layers=3)


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "model")


def change(file: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads(file.read_text())
    edit(values)
    file.write_text(json.dumps(values))


def places(value: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every key of nested objects."""
    if not isinstance(value, dict):
        return []
    return [*((*place, key) for key in value), *(p for key in value for p in places(value[key], (*place, key)))]


def told(load: Callable[[], object]) -> None:
    """Whatever is wrong, it is said in one sentence; what is not wrong enough loads."""
    try:
        load()
    except TercelError as error:
        sentence = str(error)
        assert "\n" not in sentence


def test_no_config_ends_in_anything_but_a_target_or_a_sentence(folder: Path) -> None:
    """Each key once, with wrong values in turn."""
    chosen = random.Random(0)
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        text = (folder / name).read_text()
        for place in places(json.loads(text)):
            values = json.loads(text)
            inner = values
            for key in place[:-1]:
                inner = inner[key]
            inner[place[-1]] = chosen.choice(WRONG)
            (folder / name).write_text(json.dumps(values))
            told(lambda: Target.load(str(folder)))
        (folder / name).write_text(text)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"vocab_size": 3 * 10**9}, "asks for .* numbers, but its weights have"),
        ({"hidden_size": 10**8, "head_dim": 8}, "asks for .* numbers, but its weights have"),
        ({"num_hidden_layers": 10**9}, "says num_hidden_layers 1000000000, but its weights are 29 tensors"),
        ({"num_local_experts": 10**9}, "says num_local_experts 1000000000"),
        ({"num_attention_heads": "four"}, "cannot read the configuration of"),
        ({"architectures": [3]}, "cannot read the configuration of .*TypeError"),
        ({"rms_norm_eps": float("nan")}, "cannot read the model of"),
    ],
)
def test_a_config_that_its_weights_deny(folder: Path, settings: dict[str, Any], words: str) -> None:
    change(folder / "config.json", lambda config: config.update(settings))
    with pytest.raises(TercelError, match=words):
        Target.load(str(folder))


@pytest.mark.parametrize("text", ["[" * 10_000 + "]" * 10_000, '{"x": ' + "9" * 5_000 + "}", '{"x": "\\ud800"}'])
def test_json_that_nothing_can_go_on_with(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(TercelError, match=r"config.json cannot be read as JSON"):
        load_config(str(folder))


def test_a_large_json_is_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "JSON_BYTES", 1 << 10)
    (folder / "config.json").write_text("{}" + " " * (1 << 11))
    with pytest.raises(TercelError, match=r"config.json cannot be read as JSON .it has more than"):
        resolve(str(folder))


def test_float8_weights(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"] = weights["model.layers.0.mlp.up_proj.weight"].to(torch.float8_e4m3fn)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    told(lambda: load_causal_lm(str(folder), torch.float32, "cpu"))


def test_a_tokenizer_that_breaks_on_any_text(folder: Path) -> None:
    split = {"type": "Split", "pattern": {"Regex": "(?:\\w+\\s?)+$|(a+)+b"}, "behavior": "Isolated", "invert": False}
    change(folder / "tokenizer.json", lambda tokenizer: tokenizer.update(pre_tokenizer=split))
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer("x")["input_ids"] is not None
    change(folder / "tokenizer.json", lambda tokenizer: tokenizer.update(pre_tokenizer={**split, "pattern": 3}))
    with pytest.raises(TercelError, match="cannot read the tokenizer of"):
        load_tokenizer(str(folder))


@pytest.mark.parametrize("charsmap", ["", "AAAA"])
def test_a_panic_of_the_tokenizers_library_is_one_sentence(
    folder: Path, charsmap: str, capfd: pytest.CaptureFixture[str]
) -> None:
    normalizer = {"type": "Precompiled", "precompiled_charsmap": charsmap}
    change(folder / "tokenizer.json", lambda tokenizer: tokenizer.update(normalizer=normalizer))
    with pytest.raises(TercelError, match=r"cannot read the tokenizer of .*: Precompiled: Error"):
        load_tokenizer(str(folder))
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("template", [5, ["x"], {"default": 3}])
def test_a_template_that_is_none(folder: Path, template: Any) -> None:
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    change(folder / "tokenizer_config.json", lambda config: config.update(chat_template=template))
    told(lambda: Target.load(str(folder)))


def test_a_folder_that_cannot_be_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.listdir", denied)
    with pytest.raises(TercelError, match=rf"cannot read the folder {folder}: Permission denied"):
        resolve(str(folder))


def test_names_longer_than_a_file_system_takes() -> None:
    with pytest.raises(TercelError, match="there is no folder or file"):
        resolve("/tmp/" + "x" * 300)


class TestShards:
    def sharded(self, folder: Path, name: str = "a.safetensors") -> Path:
        weights = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").rename(folder / "a.safetensors")
        index = folder / "model.safetensors.index.json"
        index.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(weights, name)}))
        return index

    def test_beside_the_index(self, folder: Path) -> None:
        self.sharded(folder)
        load_causal_lm(str(folder), torch.float32, "cpu")

    @pytest.mark.parametrize("name", ["../a.safetensors", "/etc/passwd", "b/../../a", "..", "", "a\0b", "c\\d"])
    def test_outside_of_the_folder(self, folder: Path, name: str) -> None:
        index = self.sharded(folder, name)
        with pytest.raises(TercelError, match=r"index.json names the file .* outside of its folder; do not trust it"):
            resolve(str(folder))
        with pytest.raises(TercelError):
            read_shards(index)

    def test_a_link_out_of_the_folder(self, folder: Path, tmp_path: Path) -> None:
        self.sharded(folder)
        shutil.move(folder / "a.safetensors", tmp_path / "elsewhere")
        (folder / "a.safetensors").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(TercelError, match="outside of its folder"):
            resolve(str(folder))

    def test_the_hubs_cache_keeps_links(self, folder: Path, tmp_path: Path) -> None:
        self.sharded(folder)
        snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
        (tmp_path / "models--a--b" / "blobs").mkdir(parents=True)
        snapshot.parent.mkdir()
        shutil.move(folder, snapshot)
        for number, file in enumerate(sorted(snapshot.iterdir())):
            blob = tmp_path / "models--a--b" / "blobs" / str(number)
            shutil.move(file, blob)
            file.symlink_to(Path("..", "..", "blobs", str(number)))
        load_causal_lm(str(snapshot), torch.float32, "cpu")

    def test_a_missing_one(self, folder: Path) -> None:
        self.sharded(folder, "b.safetensors")
        with pytest.raises(TercelError, match=r"names b.safetensors, which is missing"):
            resolve(str(folder))


STRING, ARRAY, UINT32 = 8, 9, 4


def header(*parts: bytes, tensors: int = 0, settings: int = 1) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, settings) + b"".join(parts)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def tensor(*dimensions: int, kind: int = 0, offset: int = 0) -> bytes:
    shape = struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
    return text(b"x") + shape + struct.pack("<IQ", kind, offset)


GGUF_BOMBS = {
    "key": (header(struct.pack("<Q", 2**40)), "cut off within its header"),
    "string": (header(text(b"a"), struct.pack("<IQ", STRING, 2**40), b"x" * 80), "claims .* bytes, more than are left"),
    "list": (header(text(b"a"), struct.pack("<IIQ", ARRAY, UINT32, 2**40)), "claims .* entries of lists"),
    "short list": (header(text(b"a"), struct.pack("<IIQ", ARRAY, UINT32, 2**20)), "claims .* bytes, more than are"),
    "list of strings": (header(text(b"a"), struct.pack("<IIQ", ARRAY, STRING, 2**20)), "cut off within its header"),
    "list of lists": (header(text(b"a"), struct.pack("<IIQ", ARRAY, ARRAY, 1)), "a list holds lists"),
    "settings": (header(settings=2**40), "claims .* settings"),
    "tensors": (header(tensors=2**40, settings=0), "claims .* tensors"),
    "dimensions": (header(text(b"x"), struct.pack("<I", 2**31), tensors=1, settings=0), "claims .* dimensions"),
    "shape": (header(tensor(2**40, 2**20), tensors=1, settings=0), "a tensor claims more than the file holds"),
    "offset": (header(tensor(1, offset=2**50), tensors=1, settings=0), "a tensor claims more than the file holds"),
    "type": (header(tensor(1, kind=999), tensors=1, settings=0), "unknown type 999"),
    "value's type": (header(text(b"a"), struct.pack("<I", 77)), "a setting has the unknown type 77"),
    "alignment": (header(text(b"general.alignment"), struct.pack("<II", UINT32, 0)), "alignment is not a power of two"),
    "version": (b"GGUF" + struct.pack("<IQQ", 9, 0, 0), "it has version 9"),
    "magic": (b"hello, this is text and long enough", "does not begin as one"),
    "empty": (b"", "cut off within its header"),
}


@pytest.mark.parametrize("bomb", GGUF_BOMBS)
def test_small_gguf_files_that_claim_much(tmp_path: Path, bomb: str) -> None:
    data, words = GGUF_BOMBS[bomb]
    (tmp_path / "a.gguf").write_bytes(data)
    with pytest.raises(TercelError, match=rf"a\.gguf is not a whole GGUF file .*{words}"):
        resolve(str(tmp_path / "a.gguf"))


def test_what_a_gguf_file_holds_is_counted(tmp_path: Path) -> None:
    model = save_tiny_gguf(tmp_path / "a.gguf")
    held = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    assert check_header(tmp_path / "a.gguf") == (len(held), sum(tensor.numel() for tensor in held.values()))


def test_flipped_bytes_in_a_gguf_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    save_tiny_gguf(tmp_path / "whole.gguf")
    whole, chosen = (tmp_path / "whole.gguf").read_bytes(), random.Random(1)
    for _ in range(12):
        data = bytearray(whole)
        data[chosen.randrange(min(len(data), 6000))] ^= 1 << chosen.randrange(8)
        (tmp_path / "a.gguf").write_bytes(data)
        told(lambda: load_tokenizer(str(tmp_path / "a.gguf")))


def on_the_hub(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str = "owner/model") -> Path:
    """Move the folder into the cache of the Hub's client, which stays offline; gives where it is there."""
    cache = folder.parent / "hub"
    repository = cache / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    (repository / "snapshots").mkdir()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return Path(shutil.move(folder, repository / "snapshots" / COMMIT))


class TestHub:
    """What comes from the Hub is looked at as a folder is."""

    @pytest.fixture
    def snapshot(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        return on_the_hub(folder, monkeypatch)

    def test_it_loads(self, snapshot: Path, whole: Path) -> None:
        model = load_causal_lm("owner/model", torch.float32, "cpu")
        assert all(map(torch.equal, model.parameters(), load_causal_lm(str(whole), torch.float32, "cpu").parameters()))
        assert load_tokenizer("owner/model").encode("the 42 cats") == load_tokenizer(str(whole)).encode("the 42 cats")
        assert Target.load("owner/model@main").fingerprint == Target.load(str(whole)).fingerprint

    def test_in_shards(self, snapshot: Path) -> None:
        index = TestShards().sharded(snapshot)
        load_causal_lm("owner/model", torch.float32, "cpu")
        change(index, lambda values: values["weight_map"].update({"model.norm.weight": "../x.safetensors"}))
        with pytest.raises(TercelError, match=r"index.json names the file .* outside of its folder"):
            load_causal_lm("owner/model", torch.float32, "cpu")

    @pytest.mark.parametrize("settings", [{"vocab_size": 3 * 10**9}, {"num_hidden_layers": 10**9}])
    def test_a_config_that_its_weights_deny(self, snapshot: Path, settings: dict[str, Any]) -> None:
        change(snapshot / "config.json", lambda config: config.update(settings))
        with pytest.raises(TercelError, match=r"configuration of owner/model (asks for|says) .*, but its weights"):
            Target.load("owner/model")

    def test_a_large_text_is_not_read(self, snapshot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with (snapshot / "vocab.json").open("wb") as stream:
            stream.truncate(limits.JSON_BYTES + 1)
        with pytest.raises(TercelError, match=r"vocab.json has more than 64 MiB"):
            load_tokenizer("owner/model")

    def test_without_safetensors(self, snapshot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        torch.save(load_file(snapshot / "model.safetensors"), snapshot / "pytorch_model.bin")
        (snapshot / "model.safetensors").unlink()
        with pytest.raises(TercelError, match=r"cannot be reached and the weights of owner/model"):
            load_causal_lm("owner/model", torch.float32, "cpu")

        def absent(*_: object, **__: object) -> None:
            raise RemoteEntryNotFoundError("404", response=MagicMock())

        monkeypatch.setattr(snapshot_module, "hf_hub_download", absent)
        with pytest.raises(TercelError, match=r"owner/model has no model.safetensors \(pickled weights are never read"):
            load_causal_lm("owner/model", torch.float32, "cpu")

    def test_at_one_commit(self, snapshot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Another commit comes to the repository when its files were looked at."""

        def then_another(*arguments: Any) -> None:
            check_sizes(*arguments)
            (snapshot.parent.parent / "refs" / "main").write_text("1" * 40)

        check_sizes = sources.check_sizes
        monkeypatch.setattr(sources, "check_sizes", then_another)
        load_causal_lm("owner/model", torch.float32, "cpu")


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""
OWN = {
    "model_type": "own",
    "architectures": ["OwnModelForCausalLM"],
    "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"},
}


class TestOwnCode:
    @pytest.fixture
    def own(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        (folder / "own.py").write_text(CODE)
        change(folder / "config.json", lambda config: config.update(OWN))
        monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(folder.parent / "modules"))
        monkeypatch.setattr("sys.path", [*sys.path])
        return folder

    def test_it_loads(self, own: Path) -> None:
        model = load_causal_lm(str(own), torch.float32, "cpu", trust_remote_code=True)
        assert type(model).__name__ == "OwnModel"

    @pytest.mark.parametrize("on_hub", [False, True])
    @pytest.mark.parametrize(
        ("settings", "words"),
        [
            ({"vocab_size": 3 * 10**9}, "asks for 96,000,000,000 numbers, but its weights have"),
            ({"hidden_size": 10**8}, "asks for 12,800,000,000 numbers, but its weights have"),
            ({"num_hidden_layers": 10**9}, "says num_hidden_layers 1000000000, but its weights are 29 tensors"),
            ({"n_layer": 10**9}, "says n_layer 1000000000, but its weights are 29 tensors"),
            ({"num_experts": 10**9}, "says num_experts 1000000000"),
        ],
    )
    def test_a_config_that_its_weights_deny(
        self, own: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], words: str, on_hub: bool
    ) -> None:
        change(own / "config.json", lambda config: config.update(settings))
        if on_hub:
            on_the_hub(own, monkeypatch)
        with pytest.raises(TercelError, match=words):
            load_causal_lm("owner/model" if on_hub else str(own), torch.float32, "cpu", trust_remote_code=True)

    def test_code_that_nobody_asked_for_hides_nothing(self, folder: Path) -> None:
        change(folder / "config.json", lambda config: config.update(auto_map=OWN["auto_map"], vocab_size=3 * 10**9))
        with pytest.raises(TercelError, match=r"asks for .* numbers, but its weights have"):
            load_causal_lm(str(folder), torch.float32, "cpu")
