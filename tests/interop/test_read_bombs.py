"""Small files that ask for much: a head's sizes and a pickle's claims are compared with what the file holds."""

from __future__ import annotations

import json
import pickle
import struct
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tercel import limits
from tercel.draft import save_head
from tercel.errors import TercelError
from tercel.interop.formats.pickles import read_pickle
from tercel.interop.formats.read import read_head
from tests.decode.drafts import random_draft, tiny_target
from tests.draft.heads_for_tests import tiny_draft
from tests.interop.foreign import edit, put, write_eagle1, write_sglang
from tests.interop.test_read import assert_same

HUGE = (3 * 10**9, 2**63, 10**30)


@pytest.fixture(autouse=True)
def nothing_large_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would fill the memory fails at once."""
    arange = torch.arange

    def small(*sizes: object, **more: object) -> torch.Tensor:
        assert all(not isinstance(size, int) or size < 10**7 for size in sizes)
        return arange(*sizes, **more)

    monkeypatch.setattr(torch, "arange", small)


@pytest.mark.parametrize("size", HUGE)
@pytest.mark.parametrize("key", ["vocab_size", "draft_vocab_size", "hidden_size", "intermediate_size", "head_dim"])
def test_sizes_of_other_makers(tmp_path: Path, key: str, size: int) -> None:
    folder = write_sglang(tiny_draft(), tmp_path / "head", **{key: size})
    with pytest.raises(TercelError):
        read_head(folder)
    put(folder, {"t2d": None})
    with pytest.raises(TercelError, match=key):
        read_head(folder)


@pytest.mark.parametrize("size", HUGE)
@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "intermediate_size", "num_attention_heads"])
def test_sizes_of_an_eagle1_head(tmp_path: Path, key: str, size: int) -> None:
    folder = write_eagle1(random_draft(tiny_target("llama")), tmp_path / "head")
    edit(folder, lambda config: config.update({key: size}))
    with pytest.raises(TercelError, match=f"{key} of a head is {size}, which no model has"):
        read_head(folder)
    edit(folder, lambda config: config.update({key: limits.HEAD_SIZE}))
    with pytest.raises(TercelError, match=r"different heads|cannot be built"):
        read_head(folder)


@pytest.mark.parametrize("size", HUGE)
@pytest.mark.parametrize("key", ["vocab_size", "draft_vocab_size", "hidden_size", "max_position_embeddings"])
def test_sizes_of_a_head_of_this_package(tmp_path: Path, key: str, size: int) -> None:
    save_head(tiny_draft(), tmp_path / "head")
    file = tmp_path / "head" / "tercel.json"
    whole = json.loads(file.read_text())
    whole["head"][key] = size
    file.write_text(json.dumps(whole))
    if key == "max_position_embeddings" and size < limits.POSITIONS:
        read_head(tmp_path / "head")  # nothing is made of them
        return
    with pytest.raises(TercelError, match=f"{key} of a head is {size}, which no model has"):
        read_head(tmp_path / "head")


def test_a_whole_vocabulary_is_compared_before_it_is_made(tmp_path: Path) -> None:
    folder = write_sglang(tiny_draft(), tmp_path / "head", vocab_size=1 << 21, draft_vocab_size=None)
    put(folder, {"t2d": None, "d2t": None})
    with pytest.raises(TercelError, match=r"lm_head.weight in .* has 40 rows"):
        read_head(folder)


def pickled(tensors: object, file: Path) -> Path:
    torch.save(tensors, file)
    return file


def test_a_tensor_expanded_over_one_number(tmp_path: Path) -> None:
    file = pickled({"fc.weight": torch.zeros(1).expand(10**6, 10**6)}, tmp_path / "a.bin")
    assert file.stat().st_size < 10_000
    with pytest.raises(TercelError, match=r"fc.weight in .*a.bin claims \[1000000, 1000000\], which is more than"):
        read_pickle(file)


def test_many_tensors_over_one_storage(tmp_path: Path) -> None:
    shared = torch.zeros(1000)
    with pytest.raises(TercelError, match="more than the file holds"):
        read_pickle(pickled({str(i): shared.view(10, 100) for i in range(100)}, tmp_path / "a.bin"))
    assert set(read_pickle(pickled({"a": shared, "b": torch.ones(3)}, tmp_path / "b.bin"))) == {"a", "b"}


def test_a_packed_zip(tmp_path: Path) -> None:
    file = pickled({"fc.weight": torch.zeros(10**6)}, tmp_path / "a.bin")
    with zipfile.ZipFile(file) as stored, zipfile.ZipFile(tmp_path / "b.bin", "w", zipfile.ZIP_DEFLATED) as packed:
        for entry in stored.infolist():
            packed.writestr(entry.filename, stored.read(entry))
    with pytest.raises(TercelError, match=r"is packed, which torch.save does not do"):
        read_pickle(tmp_path / "b.bin")


@pytest.mark.parametrize("older", [True, False])
def test_a_pickle_names_nothing_but_tensors(tmp_path: Path, older: bool) -> None:
    class Large:  # which `weights_only` would allow
        def __reduce__(self) -> object:
            return bytearray, (10**12,)

    torch.save({"x": Large()}, tmp_path / "a.bin", _use_new_zipfile_serialization=not older)
    with pytest.raises(TercelError, match=r"holds more than tensors and could run code"):
        read_pickle(tmp_path / "a.bin")


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.bool])
def test_what_heads_consist_of_is_read(tmp_path: Path, kind: torch.dtype) -> None:
    name = "d2t" if kind in (torch.int64, torch.bool) else "fc.weight"
    value = torch.ones(3, dtype=kind)
    for tensors in ({name: torch.nn.Parameter(value, requires_grad=False)}, {name: value}):
        assert torch.equal(read_pickle(pickled(tensors, tmp_path / "a.bin"))[name], value)


@pytest.mark.parametrize("entry", ["state_dict", "model_state_dict"])
def test_a_state_dict_beside_other_things(tmp_path: Path, entry: str) -> None:
    folder = write_sglang(tiny_draft(), tmp_path / "head")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    pickled({"epoch": 3, entry: tensors, "args": {"lr": 0.1}}, folder / "pytorch_model.bin")
    assert_same(read_head(folder, num_layers=8), tiny_draft())


@pytest.mark.parametrize(
    "wrap",
    [
        lambda name: f"_orig_mod.{name}",
        lambda name: f"module._orig_mod.model.{name}",
        lambda name: f"_fsdp_wrapped_module.{name}",
        lambda name: name.replace("midlayer.", "midlayer._fsdp_wrapped_module._checkpoint_wrapped_module."),
    ],
)
def test_names_without_what_wrappers_add(tmp_path: Path, wrap) -> None:
    folder = write_sglang(tiny_draft(), tmp_path / "head")
    tensors = load_file(folder / "model.safetensors")
    save_file({wrap(name): tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    assert_same(read_head(folder, num_layers=8), tiny_draft())
    put(folder, {"norm.weight": torch.ones(16), "module.norm.weight": torch.ones(16)})
    with pytest.raises(TercelError, match=r"holds norm.weight twice|mean the same tensor"):
        read_head(folder)


def test_an_entry_under_a_key_that_is_no_name(tmp_path: Path) -> None:
    key: tuple = ()
    for _ in range(12):
        key = (key, key)
    (tmp_path / "a.bin").write_bytes(pickle.dumps({key: 1}, protocol=2))
    with pytest.raises(TercelError) as caught:
        read_pickle(tmp_path / "a.bin")
    assert len(str(caught.value)) < 400


def test_a_safetensors_header_of_any_length(tmp_path: Path) -> None:
    folder = write_sglang(tiny_draft(), tmp_path / "head")
    for length in (2**40, 2**63, 10**8):
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", length) + b"{}")
        with pytest.raises(TercelError, match="is truncated or not safetensors"):
            read_head(folder)


def test_tensors_of_kinds_that_nothing_is_computed_with(tmp_path: Path) -> None:
    save_head(tiny_draft(), tmp_path / "own")
    eagle1 = write_eagle1(random_draft(tiny_target("llama")), tmp_path / "eagle1")
    tensors = torch.load(eagle1 / "pytorch_model.bin", weights_only=True)
    save_file({name: t.contiguous() for name, t in tensors.items()}, eagle1 / "model.safetensors")
    (eagle1 / "pytorch_model.bin").unlink()
    for folder in (tmp_path / "own", eagle1, write_sglang(tiny_draft(), tmp_path / "other")):
        tensors = load_file(folder / "model.safetensors")
        for kind in (torch.float8_e4m3fn, torch.int8, torch.complex64):
            save_file({**tensors, "fc.weight": tensors["fc.weight"].to(kind)}, folder / "model.safetensors")
            with pytest.raises(TercelError, match=rf"holds quantised weights .fc.weight, {str(kind)[6:]}"):
                read_head(folder)


DATA = {"data": [], "tokens": 1, "supervised_tokens": 1}
RECIPE = {"step": 1, "steps": 1, "dtype": "", "draft_vocabulary_coverage": 1}
RUN = {"shape": "", "dtype": "", "device": "", "temperature": 0, "max_new_tokens": 1}
WRONG_HISTORIES = [
    ("training", {**DATA, "conversations": "many"}, "training.conversations in .* must be a whole number, not 'many'"),
    ("training", {"data": "a.jsonl"}, "training.data in .* must be a list"),
    ("training", {"draft_vocabulary_coverage": None}, "must be a number, not 'None'"),
    ("training", {**RECIPE, "recipe": [1]}, "recipe in .* must be an object"),
    ("training", {"conversations": 3}, "training in .* has conversations but no data"),
    ("measured", {"held_out": {"tau": 2}}, "measured.held_out in .* has no alpha"),
    ("measured", {"held_out": {"tau": "2", "rows": 1, "alpha": []}}, "measured.held_out.tau in .* must be a number"),
    ("measured", {"held_out": {"tau": 1, "alpha": [1, True]}}, "an entry of measured.held_out.alpha in .* must be"),
    ("measured", {"decoding": [{**RUN, "tasks": {"a": 3}}]}, "tasks.a in .* must be an object"),
    ("training", {"chat_template": {"source": "s"}}, "training.chat_template in .* has no rendered"),
    (
        "training",
        {"chat_template": {"source": "s", "rendered": "r", "arguments": 3}},
        "training.chat_template.arguments in .* must be an object, not '3'",
    ),
    ("training", {"embeddings": None}, "training.embeddings in .* must be text, not 'None'"),
    ("measured", {"held_out": {"tau": 1, "alpha": []}}, "measured.held_out in .* has no steps"),
    ("target", {"name": 1, "weights": "w", "tokenizer": "t"}, "must tell the target by three texts"),
    ("target", ["name"], "is incomplete"),
]


@pytest.mark.parametrize(("part", "value", "words"), WRONG_HISTORIES)
def test_wrong_types_in_a_record(tmp_path: Path, part: str, value: object, words: str) -> None:
    save_head(tiny_draft(), tmp_path / "head")
    file = tmp_path / "head" / "tercel.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), part: value}))
    with pytest.raises(TercelError, match=words):
        read_head(tmp_path / "head")


ROPES = [{"factor": 0}, {"rope_type": "linear", "factor": 0.0}, {"rope_type": 3}, {"rope_type": "yarn"}]


@pytest.mark.parametrize("rope", ROPES)
def test_frequencies_that_are_none(tmp_path: Path, rope: dict[str, object]) -> None:
    parameters = {"rope_type": "default", "rope_theta": 1e4, **rope}
    folder = write_sglang(tiny_draft(), tmp_path / "head", rope_parameters=parameters)
    if rope == {"factor": 0}:
        read_head(folder)  # plain RoPE takes no factor
        return
    with pytest.raises(TercelError, match=r"cannot be built|frequencies are not numbers|must be a name"):
        read_head(folder)
