"""A target that is not loaded tells what the loaded one does, or nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tercel.errors import TercelError
from tercel.target_model.model import Target
from tercel.target_model.stored import StoredTarget
from tests.target_model.test_wrong_files import on_the_hub
from tests.tiny import save_tiny, save_tiny_gguf, tiny_model


def tells_what_the_loaded_one_does(stored: StoredTarget, loaded: Target) -> None:
    for name in ("num_layers", "hidden_size", "vocab_size", "tokenizer_digest"):
        assert getattr(stored, name) == getattr(loaded, name), name
    assert stored.model_type == loaded.config.model_type
    assert stored.is_recorded_as(loaded.fingerprint) is True
    assert stored.is_recorded_as("2-0123456789abcdef") is False
    assert stored.is_recorded_as("0123456789abcdef") is None  # of the first scheme, which takes the model


@pytest.mark.parametrize("arch", ["llama", "gemma3", "gpt2", "opt", "mixtral"])
def test_of_a_folder(arch: str, tmp_path: Path) -> None:
    folder = str(save_tiny(tmp_path, arch))
    stored = StoredTarget.find(folder, ask_hub=False)
    tells_what_the_loaded_one_does(stored, Target.load(folder, dtype=torch.bfloat16))
    assert stored.address == folder


def test_of_a_gguf_file(tmp_path: Path, cache: Path) -> None:
    save_tiny_gguf(tmp_path / "tiny.gguf")
    stored = StoredTarget.find(str(tmp_path / "tiny.gguf"), ask_hub=False)
    tells_what_the_loaded_one_does(stored, Target.load(str(tmp_path / "tiny.gguf")))
    assert Path(stored.address).is_dir()
    assert cache in Path(stored.address).parents


def test_of_the_hub_what_was_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = on_the_hub(save_tiny(tmp_path, "llama"), monkeypatch)
    stored = StoredTarget.find("owner/model", ask_hub=False)
    tells_what_the_loaded_one_does(stored, Target.load("owner/model"))
    assert stored.address == "owner/model"
    embeddings = stored.embeddings()
    assert embeddings is not None
    assert torch.equal(embeddings, tiny_model("llama").get_input_embeddings().weight)
    (snapshot / "model.safetensors").rename(snapshot / "elsewhere.safetensors")  # what is there is not all
    (snapshot / "model.safetensors.index.json").write_text('{"weight_map": {"lm_head.weight": "gone.safetensors"}}')
    assert stored.is_recorded_as("2-0123456789abcdef") is None
    (snapshot / "tokenizer.json").unlink()
    partly = StoredTarget.find("owner/model", ask_hub=False)
    assert (partly.num_layers, partly.tokenizer_or_none) == (8, None)
    with pytest.raises(TercelError, match="owner/model has no tokenizer that can be read"):
        _ = partly.tokenizer_digest
    (snapshot / "config.json").unlink()
    assert StoredTarget.find("owner/model", ask_hub=False).unread is None
    nothing = StoredTarget.find("owner/model", ask_hub=True)
    assert nothing.settings is None
    assert "cannot be reached" in str(nothing.unread)


def test_what_is_no_target(tmp_path: Path) -> None:
    with pytest.raises(TercelError, match="there is no folder or file"):
        StoredTarget.find(str(tmp_path / "gone"), ask_hub=False)
    (tmp_path / "empty").mkdir()
    with pytest.raises(TercelError, match=r"has no config\.json"):
        StoredTarget.find(str(tmp_path / "empty"), ask_hub=False)
