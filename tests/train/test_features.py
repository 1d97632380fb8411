"""Batches online and from the cache, and what becomes of damaged cache files."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tercel.train import features
from tercel.train.features import FeatureSupply
from tercel.train.ttt import Batch
from tests.draft.heads_for_tests import some_vocabulary
from tests.train.worlds import LAYERS, chat, head_for, random_chat, target_of

CHATS = [random_chat(n, n) for n in (9, 14, 5)]


def supply_of(arch="llama", cache=None, dtype=torch.float32, **flags) -> FeatureSupply:
    target, vocabulary = target_of(arch, dtype), some_vocabulary(60)
    return FeatureSupply(target, head_for(target, vocabulary, **flags), vocabulary, cache=cache)


def equal(a: Batch, b: Batch) -> None:
    assert a.lengths == b.lengths
    for field in dataclasses.fields(a):
        x, y = getattr(a, field.name), getattr(b, field.name)
        if isinstance(x, torch.Tensor):
            assert torch.equal(x, y), field.name
    assert torch.equal(a.teacher.probs, b.teacher.probs)
    assert torch.equal(a.teacher.best, b.teacher.best)


@pytest.mark.parametrize("arch", ["llama", "gemma3", "granite"])
def test_a_batch_holds_what_the_target_says_of_each_chat_alone(arch):
    supply = supply_of(arch)
    batch = supply.batch(CHATS)
    start = 0
    for one in CHATS:
        tokens = torch.tensor(one.tokens[None]).long()
        own = supply.target.model(input_ids=tokens, output_hidden_states=True)
        part = slice(start, start + len(one))
        wanted = torch.cat([own.hidden_states[i][0] for i in LAYERS], -1)
        torch.testing.assert_close(batch.features[part], wanted, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(batch.embeddings[part], own.hidden_states[0][0])
        p = torch.softmax(own.logits[0][:, supply.vocabulary.ids], -1)
        for t in range(len(one)):
            row = int(batch.taught[start + t])
            predicts = t + 1 < len(one) and bool(one.supervised[t + 1])
            assert (row >= 0) == predicts
            if predicts:
                torch.testing.assert_close(batch.teacher.probs[row], p[t], rtol=1e-3, atol=1e-5)
        start += len(one)
    assert batch.positions.tolist() == [t for one in CHATS for t in range(len(one))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cache_gives_equal_batches_without_the_target(tmp_path, monkeypatch, dtype):
    plain = supply_of(dtype=dtype).batch(CHATS)
    cached = supply_of(cache=tmp_path, dtype=dtype)
    equal(cached.batch(CHATS), plain)
    assert len(list(tmp_path.rglob("*.safetensors"))) == 3
    monkeypatch.setattr(features.FeatureSupply, "_run", None)
    equal(supply_of(cache=tmp_path, dtype=dtype).batch(CHATS), plain)


def cut(path):
    path.write_bytes(path.read_bytes()[:-30])


def flip(path):
    """One bit of a weight."""
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(data)


def rename(path):
    save_file({"something": torch.ones(2)}, path)


def shorten(path):
    save_file({**load_file(path), "features": torch.ones(2, 96)}, path)


def as_an_earlier_version(path):
    save_file(load_file(path), path)


def of_another_chat(path):
    stored = load_file(path)
    right = features._checksum("another.safetensors", features.Encoded(stored["features"], stored["hidden"]))
    save_file(stored, path, metadata={features.CHECKSUM: right})


@pytest.mark.parametrize(
    "damage",
    [cut, flip, rename, shorten, as_an_earlier_version, of_another_chat, lambda path: path.write_bytes(b"")],
)
def test_damaged_entries_are_made_again(tmp_path, damage):
    supply = supply_of(cache=tmp_path)
    truth = supply.batch(CHATS)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.safetensors")}
    for path in before:
        damage(path)
    again = supply_of(cache=tmp_path)
    equal(again.batch(CHATS), truth)
    assert again.made_again == 3
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.safetensors")} == before


def test_other_layers_targets_dtypes_and_masks_have_other_entries(tmp_path):
    one = [CHATS[0]]
    supply_of(cache=tmp_path).batch(one)
    supply_of(cache=tmp_path, feature_layers=(0, 1)).batch(one)
    supply_of("qwen2", cache=tmp_path).batch(one)
    supply_of(cache=tmp_path, dtype=torch.bfloat16).batch(one)
    supply_of(cache=tmp_path).batch([chat(CHATS[0].tokens.tolist(), [True] * 9)])
    assert len(list(tmp_path.rglob("*.safetensors"))) == 5


def test_a_batch_partly_from_the_cache_is_on_one_device(tmp_path, monkeypatch):
    """What comes from files is on the CPU, what comes from the target on its device."""
    supply_of(cache=tmp_path).batch(CHATS[:1])
    supply = supply_of(cache=tmp_path)
    meta = torch.device("meta")
    monkeypatch.setattr(supply, "target", SimpleNamespace(device=meta))
    monkeypatch.setattr(supply, "_write", lambda *_: None)
    fresh = supply_of()._run(CHATS[1:2])
    there = [features.Encoded(e.features.to(meta), e.hidden.to(meta)) for e in fresh]
    monkeypatch.setattr(supply, "_run", lambda _: there)
    assert {part.device for e in supply.encode(CHATS[:2]) for part in (e.features, e.hidden)} == {meta}


@given(lengths=st.lists(st.integers(1, 60), max_size=12))
def test_groups_waste_little_padding(lengths):
    groups = features._padding_groups(lengths)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    for group in groups:
        padded = max(lengths[i] for i in group) * len(group)
        assert padded <= features.PADDING_WASTE * sum(lengths[i] for i in group)
