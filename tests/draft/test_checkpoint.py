"""Saving and reading heads, and every kind of damage."""

from __future__ import annotations

import errno
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tercel.draft import DraftModel, checkpoint, load_head, save_head
from tercel.errors import TercelError
from tests.draft.heads_for_tests import some_vocabulary, tiny_draft, tiny_head


@pytest.fixture
def saved(tmp_path) -> Path:
    save_head(tiny_draft(), tmp_path / "head", dtype=torch.float32, card="# A head\n")
    return tmp_path / "head"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "flags", [{}, {"fc_norm": True, "norm_output": True}, {"hidden_size": 32}, {"num_decoder_layers": 2}]
)
def test_round_trip(tmp_path, dtype, flags):
    model = tiny_draft(**flags)
    save_head(model, tmp_path / "a", dtype=dtype)
    back = load_head(tmp_path / "a", dtype=dtype)
    assert back.head.config == model.head.config
    assert back.info == model.info
    assert torch.equal(back.vocabulary.ids, model.vocabulary.ids)
    for (name, ours), (_, theirs) in zip(model.head.named_parameters(), back.head.named_parameters(), strict=True):
        assert torch.equal(ours.to(dtype), theirs), name
        assert not theirs.requires_grad


def test_a_whole_vocabulary_needs_no_map(tmp_path):
    model = tiny_draft(draft_vocab_size=128)
    save_head(model, tmp_path / "a")
    edit_tensors(tmp_path / "a", lambda t: (t.pop("d2t"), t.pop("t2d")))
    assert len(load_head(tmp_path / "a").vocabulary) == 128


def test_the_public_files_say_what_loaders_look_for(saved):
    tensors = load_file(saved / "model.safetensors")
    names = {
        *("fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"),
        *(f"midlayer.self_attn.{x}_proj.weight" for x in "qkvo"),
        *(f"midlayer.mlp.{x}_proj.weight" for x in ("gate", "up", "down")),
        *(f"midlayer.{x}.weight" for x in ("input_layernorm", "hidden_norm", "post_attention_layernorm")),
    }
    assert set(tensors) == names
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (4 * 8, 2 * 16)
    assert tensors["lm_head.weight"].shape == (40, 16)
    config = json.loads((saved / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (config["vocab_size"], config["draft_vocab_size"]) == (128, 40)
    assert config["norm_before_residual"] is False
    own = json.loads((saved / "tercel.json").read_text())
    assert own["layer_ids_mean"] == "input of decoder layer i"
    assert own["head"]["feature_layers"] == [2, 4, 5]
    assert (saved / "README.md").read_text() == "# A head\n"


def edit_json(folder: Path, change) -> None:
    path = folder / "tercel.json"
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def edit_tensors(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def put(**values: Any):
    return lambda folder: edit_tensors(folder, lambda t: t.update(values))


def spoil(tensors: dict[str, torch.Tensor]) -> None:
    tensors["fc.weight"][1, 2] = float("nan")


def far_d2t(tensors: dict[str, torch.Tensor]) -> None:
    tensors["d2t"][-1] = 1000


def other_t2d(tensors: dict[str, torch.Tensor]) -> None:
    tensors["t2d"][:] = True


def sizes(**values: Any):
    return lambda folder: edit_json(folder, lambda own: own["head"].update(values))


def part(**values: Any):
    return lambda folder: edit_json(folder, lambda own: own.update(values))


DAMAGE = [
    (truncate, "model.safetensors is truncated or not safetensors"),
    (lambda f: (f / "model.safetensors").write_bytes(b""), "is truncated or not safetensors"),
    (lambda f: (f / "model.safetensors").unlink(), "has no model.safetensors"),
    (lambda f: edit_tensors(f, spoil), "fc.weight in .* holds NaN or infinite numbers"),
    (
        lambda f: edit_tensors(f, lambda t: t.pop("norm.weight")),
        "lacks norm.weight .1 tensors missing in all",
    ),
    (
        put(**{"midlayer.extra.weight": torch.ones(2)}),
        "holds midlayer.extra.weight, which no head of EAGLE-3 has",
    ),
    (
        put(**{"norm.weight": torch.ones(3)}),
        r"norm.weight in .* is \[3\], but the head's sizes ask for \[16\]",
    ),
    (put(d2t=torch.zeros(5, dtype=torch.long)), "d2t has 5 rows but the head's lm_head has 40"),
    (put(d2t=torch.zeros(40)), "d2t holds float32 numbers"),
    (lambda f: edit_tensors(f, far_d2t), "names token 1039, but the target has 128 tokens"),
    (lambda f: edit_tensors(f, other_t2d), "maps d2t and t2d that contradict each other"),
    (lambda f: edit_tensors(f, lambda t: t.pop("d2t")), "drafts 40 of 128 tokens but has no map d2t"),
    (lambda f: (f / "tercel.json").unlink(), "has no tercel.json"),
    (lambda f: (f / "tercel.json").write_text('{"format": 1,'), "tercel.json cannot be read as JSON"),
    (lambda f: (f / "tercel.json").write_bytes(b"\xff\xfe\x00"), "tercel.json cannot be read as JSON"),
    (lambda f: (f / "tercel.json").write_text("[]"), "holds a list, not an object"),
    (part(format=2), "has format 2, but this version reads format 1"),
    (part(head=[1]), "has no object 'head'"),
    (part(training=None), "has no object 'training'"),
    (part(target={"name": "x"}), "is incomplete"),
    (lambda f: edit_json(f, lambda own: own["head"].pop("hidden_size")), "is incomplete .*hidden_size"),
    (
        lambda f: edit_json(f, lambda own: own["head"].pop("feature_layers")),
        "is incomplete .'feature_layers'",
    ),
    (
        sizes(feature_layers=[2, 4, 8]),
        "tercel.json: feature layer 8 is out of range for a target of 8 layers",
    ),
    (sizes(feature_layers="245"), "feature layer '2' is out of range"),
    (sizes(feature_layers=3), "is incomplete"),
    (sizes(hidden_size="16"), "hidden_size of a head must be a whole number of at least 1, not '16'"),
    (sizes(hidden_size=16.0), "hidden_size of a head must be a whole number"),
    (sizes(intermediate_size=10**6), r"mlp.\w+.weight in .* but the head's sizes ask for"),
    (sizes(intermediate_size=10**12), "intermediate_size of a head is 1000000000000, which no model has"),
    (sizes(num_key_value_heads=3), "cannot share 3 key/value heads"),
    (sizes(rope_parameters=None), "must name a rope_theta"),
    (
        sizes(rope_parameters={"rope_type": "spiral", "rope_theta": 1e4}),
        "describes a head that cannot be built",
    ),
    (sizes(fc_norm=True), "lacks fc_norm.0.weight .3 tensors missing"),
]


@pytest.mark.parametrize(("damage", "words"), DAMAGE)
def test_damage_is_named(saved, damage, words):
    damage(saved)
    with pytest.raises(TercelError, match=words) as caught:
        load_head(saved)
    assert str(saved) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_folder(tmp_path):
    with pytest.raises(TercelError, match="there is no head at"):
        load_head(tmp_path / "nothing")


class Bomb:
    def __reduce__(self):
        return (Path.touch, (Bomb.trace,))

    trace = Path()


def test_a_pickle_is_refused_and_its_code_does_not_run(saved):
    Bomb.trace = saved / "ran"
    (saved / "model.safetensors").unlink()
    (saved / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(TercelError, match=r"pytorch_model\.bin is a pickle, which can run code when it is read"):
        load_head(saved)
    assert not Bomb.trace.exists()


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize(
    ("error", "seen"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt),
        (OSError(errno.ENOSPC, "No space left on device"), TercelError),
        (MemoryError(), MemoryError),
    ],
)
def test_a_save_that_fails_leaves_the_old_head_and_no_litter(saved, monkeypatch, error, seen):
    before = files(saved.parent)

    def fail(tensors, path, metadata):
        Path(path).write_bytes(b"half a head")
        raise error

    monkeypatch.setattr(checkpoint, "save_file", fail)
    with pytest.raises(seen, match="No space left" if seen is TercelError else None):
        save_head(tiny_draft(fc_norm=True), saved)
    assert files(saved.parent) == before
    load_head(saved)


def test_a_save_that_fails_at_the_second_file_leaves_nothing(tmp_path, monkeypatch):
    def fail(value):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "as_json", fail)
    with pytest.raises(TercelError, match="No space left on device"):
        save_head(tiny_draft(), tmp_path / "head")
    assert list(tmp_path.iterdir()) == []


def test_a_new_head_takes_the_old_ones_place_and_nothing_else(saved):
    (saved / "training").mkdir()
    (saved / "training" / "state").write_text("s")
    (saved / "thesis.txt").write_text("mine")
    save_head(tiny_draft(fc_norm=True), saved, card="# Another head\n")
    assert load_head(saved).head.config.fc_norm
    assert (saved / "training" / "state").read_text() == "s"
    assert (saved / "thesis.txt").read_text() == "mine"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_files_of_another_maker_are_never_replaced(tmp_path, name):
    (tmp_path / name).write_text("of a target, perhaps")
    with pytest.raises(TercelError, match=f"holds a {name} that tercel did not write there"):
        save_head(tiny_draft(), tmp_path)
    assert files(tmp_path) == {name: b"of a target, perhaps"}


def test_a_card_that_somebody_wrote_or_edited_stays(tmp_path, saved):
    (tmp_path / "README.md").write_text("of my repository")
    save_head(tiny_draft(), tmp_path, card="# A head\n")
    save_head(tiny_draft(), tmp_path, card="# A head\n")
    assert (tmp_path / "README.md").read_text() == "of my repository"
    save_head(tiny_draft(), tmp_path / "own", card="# A head\n")
    save_head(tiny_draft(), tmp_path / "own", card="# A better head\n")
    assert (tmp_path / "own" / "README.md").read_text() == "# A better head\n"
    (tmp_path / "own" / "README.md").write_text("# A better head, used by my lab\n")
    save_head(tiny_draft(), tmp_path / "own", card="# The best head\n")
    save_head(tiny_draft(), tmp_path / "own")
    assert (tmp_path / "own" / "README.md").read_text() == "# A better head, used by my lab\n"


def test_a_head_without_its_hidden_file_is_still_known(saved):
    """As an earlier version wrote it, or as `cp folder/*` copies it."""
    (saved / ".tercel-files.json").unlink()
    save_head(tiny_draft(fc_norm=True), saved)
    assert load_head(saved).head.config.fc_norm


def test_a_head_with_nan_can_not_come_back(tmp_path):
    model = tiny_draft()
    with torch.no_grad():
        model.head.lm_head.weight[0, 0] = float("inf")
    save_head(model, tmp_path / "a")
    with pytest.raises(TercelError, match=r"lm_head\.weight"):
        load_head(tmp_path / "a")


def test_a_map_of_another_size_than_the_head_is_refused_when_read(tmp_path):
    model = tiny_draft()
    mixed = DraftModel(tiny_head(model.head.config), some_vocabulary(39), model.info)
    save_head(mixed, tmp_path / "a")
    with pytest.raises(TercelError, match="d2t has 39 rows"):
        load_head(tmp_path / "a")
