"""Where weights may stand, and what is refused before anything of them is believed: nothing is executed."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tercel.errors import TercelError
from tercel.interop.formats.files import read_weights
from tercel.interop.formats.read import read_head
from tests.draft.heads_for_tests import tiny_draft
from tests.interop.foreign import put, write_sglang
from tests.interop.test_read import assert_same


@pytest.fixture
def plain(tmp_path) -> Path:
    return write_sglang(tiny_draft(), tmp_path / "head")


def shard(folder: Path, suffix: str, save) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    files = {f"{stem}-0000{i + 1}-of-00002.{suffix}": names[i::2] for i in range(2)}
    for file, part in files.items():
        save({name: tensors[name] for name in part}, folder / file)
    index = {"metadata": {}, "weight_map": {name: file for file, part in files.items() for name in part}}
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps(index))


def test_one_pickle(tmp_path):
    folder = write_sglang(tiny_draft(), tmp_path / "head", pickled=True)
    assert_same(read_head(folder, num_layers=8), tiny_draft())


def test_a_pickle_in_the_older_format(plain):
    tensors = load_file(plain / "model.safetensors")
    (plain / "model.safetensors").unlink()
    torch.save(tensors, plain / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert_same(read_head(plain, num_layers=8), tiny_draft())


@pytest.mark.parametrize(("suffix", "save"), [("safetensors", save_file), ("bin", torch.save)])
def test_shards(plain, suffix, save):
    shard(plain, suffix, save)
    assert_same(read_head(plain, num_layers=8), tiny_draft())


def test_another_name_where_it_is_the_only_one(plain):
    (plain / "model.safetensors").rename(plain / "eagle3.safetensors")
    assert_same(read_head(plain, num_layers=8), tiny_draft())


def test_safetensors_go_before_a_pickle(plain):
    (plain / "pytorch_model.bin").write_bytes(b"not even a pickle")
    assert_same(read_head(plain, num_layers=8), tiny_draft())


class Bomb:
    trace = Path()

    def __reduce__(self):
        return (Path.touch, (Bomb.trace,))


@pytest.mark.parametrize("how", ["bare", "in a state dict", "older format"])
def test_a_pickle_that_would_run_code_is_refused_and_does_not(plain, how):
    Bomb.trace = plain / "ran"
    (plain / "model.safetensors").unlink()
    file = plain / "pytorch_model.bin"
    if how == "bare":
        file.write_bytes(pickle.dumps(Bomb()))
    else:
        torch.save({"fc.weight": Bomb()}, file, _use_new_zipfile_serialization=how != "older format")
    with pytest.raises(TercelError, match="its pickle holds more than tensors and could run code, so it was not read"):
        read_head(plain)
    assert not Bomb.trace.exists()


def test_a_bomb_works_where_nobody_looks(tmp_path):
    Bomb.trace = tmp_path / "ran"
    pickle.loads(pickle.dumps(Bomb()))
    assert Bomb.trace.exists()


def truncated(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def pickled(value: object):
    def change(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        torch.save(value, folder / "pytorch_model.bin")

    return change


def cut_pickle(folder: Path) -> None:
    pickled({"fc.weight": torch.ones(4000)})(folder)
    file = folder / "pytorch_model.bin"
    file.write_bytes(file.read_bytes()[:-300])


def index(weight_map: object):
    def change(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "a.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return change


DAMAGE = [
    (truncated, "model.safetensors is truncated or not safetensors"),
    (lambda f: (f / "model.safetensors").write_bytes(b""), "is truncated or not safetensors"),
    (lambda f: (f / "model.safetensors").unlink(), "has neither model.safetensors nor pytorch_model.bin"),
    (lambda f: (f / "config.json").unlink(), "has no config.json, so it is unknown what its weights are"),
    (lambda f: (f / "config.json").write_text("{"), "config.json cannot be read as JSON"),
    (lambda f: (f / "config.json").write_text("[" * 100_000), "config.json cannot be read as JSON"),
    (lambda f: (f / "config.json").write_text("[]"), "holds a list, not an object"),
    (cut_pickle, "pytorch_model.bin is (truncated|damaged)"),
    (pickled([torch.ones(2)]), "holds a list, but a head's file maps names to tensors"),
    (pickled({"epoch": 3, "fc.weight": torch.ones(2)}), "holds an entry 'epoch' that is not a tensor"),
    (pickled({3: torch.ones(2)}), "holds an entry under a int that is not a tensor"),
    (pickled({"fc.weight": torch.eye(3).to_sparse()}), "fc.weight in .* is a sparse or quantised tensor"),
    (index(None), "has no weight_map from tensors to files"),
    (index({"fc.weight": 3}), "has no weight_map from tensors to files"),
    (index({"fc.weight": "b.safetensors"}), "names b.safetensors, which is missing"),
    (index({"other": "a.safetensors"}), "says other is in a.safetensors, but it is not"),
    (index({"fc.weight": "../a.safetensors"}), "outside of its folder; do not trust it"),
    (index({"fc.weight": "/etc/passwd"}), "outside of its folder; do not trust it"),
]


@pytest.mark.parametrize(("damage", "words"), DAMAGE)
def test_damage_is_named(plain, damage, words):
    damage(plain)
    with pytest.raises(TercelError, match=words) as caught:
        read_head(plain)
    assert str(plain) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_folder(tmp_path):
    with pytest.raises(TercelError, match="there is no head at"):
        read_head(tmp_path / "nothing")


def test_reading_leaves_the_folder_as_it_was(plain):
    before = {file.name: file.read_bytes() for file in plain.iterdir()}
    read_head(plain)
    assert {file.name: file.read_bytes() for file in plain.iterdir()} == before


def test_weights_name_their_file(plain):
    put(plain, {"t2d": None})
    weights = read_weights(plain)
    assert weights.file == plain / "model.safetensors"
    assert "t2d" not in weights.tensors
